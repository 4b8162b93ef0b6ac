"""Which heads matter, at a glance; and what their gates would be from other starts."""

from __future__ import annotations

from math import isnan
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from mhaprune.reporting.plots import COLOURS, MARKERS, Plot, Tables, columns_of, legend_above, number, panels
from mhaprune.reporting.verdict import SITE_LABELS, verdict

NATS = {"ablation": " (rise of the loss in nats)"}
LIGHTEST = 0.3
"""Of a tile that stays, on the scale of its colours: no head that matters is as pale as one that can go."""


def heads_that_matter(tables: Tables) -> Plot | None:
    """A map of the model with a tile per head: dark what matters, empty what can go."""
    found = verdict(tables)
    if found is None or found.heads.empty:
        return None
    heads, scorer, title, meaning = found
    rows = list(heads[["site", "layer"]].drop_duplicates().itertuples(index=False, name=None))
    columns = int(heads["head"].max()) + 1
    named = (heads["name"] != "").any()
    width = 1.8 if named else 0.95
    figure = Figure(figsize=(max(1.5 + width * columns, 0.112 * len(title)), 1.15 + 0.55 * len(rows)))
    axes = figure.add_subplot()
    highest = heads["score"].max()
    shade = PowerNorm(0.5, 0, highest if highest > 0 else 1.0)
    for _, head in heads.iterrows():
        share = 0.5 if isnan(head["score"]) else float(shade(max(head["score"], 0.0)))
        _tile(axes, head, rows.index((head["site"], head["layer"])), LIGHTEST + (1 - LIGHTEST) * share)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(len(rows) - 0.5, -0.5), xticks=range(columns), xlabel="head")
    axes.set_yticks(range(len(rows)), [f"{SITE_LABELS[site]} {layer}" for site, layer in rows])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    figure.suptitle(title, fontsize=12.5, fontweight="bold")
    stays, goes = (heads[heads["stays"] == flag] for flag in (True, False))
    caption = meaning
    if scorer:
        caption += f" The numbers are scores by {scorer}{NATS.get(scorer, '')}, the darker the higher"
        caption += ", the words what the head looks at." if named else "."
    alt = f"{title}. Stay: {_list(stays) or 'none'}. Can go: {_list(goes) or 'none'}."
    return Plot("matter", caption, figure, alt)


def _tile(axes: Axes, head: pd.Series, row: int, depth: float) -> None:
    look: Any = {"facecolor": matplotlib.colormaps["Blues"](depth), "edgecolor": "none"}
    ink = "white" if depth > 0.55 else "black"
    if not head["stays"]:
        look, ink = {"facecolor": "none", "edgecolor": "#8c8c8c", "linestyle": (0, (3, 2))}, "#595959"
    box = FancyBboxPatch((head["head"] - 0.45, row - 0.42), 0.9, 0.84, "round,pad=0,rounding_size=0.1", **look)
    axes.add_patch(box)
    lines = [] if isnan(head["score"]) else [number(head["score"], 3)]
    words = "\n".join([*lines, *filter(None, [head["name"]])]) or ("stays" if head["stays"] else "goes")
    weight = "bold" if head["stays"] else "normal"
    axes.text(head["head"], row, words, ha="center", va="center", fontsize=9, color=ink, fontweight=weight)


def _list(heads: pd.DataFrame) -> str:
    parts = []
    for head in heads.itertuples():
        score = "" if isnan(head.score) else f" ({number(head.score, 3)})"
        parts.append(f"{SITE_LABELS[head.site]} {head.layer}.{head.head}{score}")
    return ", ".join(parts)


def gates_from_other_starts(tables: Tables) -> Plot | None:
    """Where the gates of each block go from other starts, beside those that the model has."""
    if "starts" not in tables:
        return None
    starts, agreement = tables["starts"], tables["gates"].set_index("gates")
    blocks = list(starts[["site", "layer"]].drop_duplicates().itertuples(index=False, name=None))
    columns = columns_of(len(blocks), 3)
    lines = -(-len(blocks) // columns)
    figure = Figure(figsize=(1 + 2.6 * columns, 0.9 + 1.9 * lines))
    grid = panels(figure, len(blocks), columns, "head", "gate", sharey=True)
    numbers = sorted(starts["start"].unique())
    for axes, (site, layer) in zip(grid, blocks, strict=True):
        mine = starts[(starts["site"] == site) & (starts["layer"] == layer)]
        own = mine[mine["start"] == numbers[0]]
        axes.plot(own["head"], own["gate_own"], "_", color="black", markersize=22, mew=2.5, label="as trained")
        for i, start in enumerate(numbers):
            run = mine[mine["start"] == start]
            x = run["head"] + 0.24 * (i - (len(numbers) - 1) / 2)
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            axes.vlines(x, run["gate_start"], run["gate_end"], linewidth=1, color=colour)
            axes.plot(x, run["gate_start"], marker, color=colour, mfc="white", label=f"start {start}")
            axes.plot(x, run["gate_end"], marker, color=colour, label=f"end {start}")
        axes.set(title=f"{SITE_LABELS[site]} {layer}", xticks=sorted(mine["head"].unique()))
        axes.margins(x=0.15)
    legend_above(figure, grid[0])
    rhos = [number(agreement.loc[f"weights held still, start {n}", "spearman_with_own"], 2) for n in numbers]
    caption = (
        "Do learned gates depend on where they start? From other starts (open marks), all weights held still, they go"
        " to the filled ones; black bars are those of the model. The gates of a block keep their sum. Rank correlation"
        f" of the ends with the model's own over all heads: {', '.join(rhos)}."
    )
    return Plot("gates", caption, figure)
