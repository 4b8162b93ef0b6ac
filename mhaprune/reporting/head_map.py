"""Which heads matter, at a glance."""

from __future__ import annotations

from math import isnan
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from mhaprune.reporting.plots import Plot, number
from mhaprune.reporting.verdict import Verdict
from mhaprune.tables import REFERENCE, block_label, blocks_in, named

NATS = {REFERENCE: " (rise of the loss in nats)"}
LIGHTEST = 0.3
"""The palest colour of a tile that stays, so that it never looks like a tile that can go."""


def heads_that_matter(verdict: Verdict) -> Plot:
    """A map of the model with a tile per head: dark what matters, empty what can go."""
    heads, scorer, title, meaning = verdict
    rows = blocks_in(heads)
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
    axes.set_yticks(range(len(rows)), [block_label(*row) for row in rows])
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
    scores = ("" if isnan(score) else f" ({number(score, 3)})" for score in heads["score"])
    return ", ".join(f"{head.label}{score}" for head, score in zip(named(heads), scores, strict=True))
