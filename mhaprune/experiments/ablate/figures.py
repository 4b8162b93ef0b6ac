"""The figures of one run: accuracy, scores, agreement with ablation, time, training."""

from __future__ import annotations

from functools import partial
from math import floor, log10
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mhaprune.reporting.plots import (
    COLOURS,
    CONTROL_COLOUR,
    MARKERS,
    Plot,
    Tables,
    candidates,
    columns_of,
    controls,
    draw_band,
    errors,
    line_style,
    number,
    panels,
    power_of_ten,
    write_cells,
)
from mhaprune.reporting.verdict import SITE_LABELS
from mhaprune.scorers.agreement import REFERENCE, with_reference


def accuracy_curves(tables: Tables) -> Plot | None:
    """Exact match against heads removed, for every scorer, with the band of the random control."""
    if "pruning" not in tables:
        return None
    pruning = tables["pruning"]
    figure = Figure(figsize=(7, 4.2))
    axes = figure.add_subplot()
    _draw_curves(axes, pruning)
    total = int(pruning["heads_total"].max())
    axes.set(xlabel=f"heads removed, of {total}", ylabel="exact match", ylim=(-0.03, 1.03))
    axes.set_xticks(sorted(pruning["heads_removed"].unique()))
    axes.legend()
    caption = (
        "Exact match under greedy decoding on the report split after the heads that each chose were removed."
        " Bars are 95 % intervals over examples"
    )
    band = ", the grey line and band the mean and range of the random control." if len(controls(pruning)) else "."
    return Plot("accuracy", caption + band, figure)


def _draw_curves(axes: Axes, pruning: pd.DataFrame) -> None:
    """One line per scorer with its intervals; scorers of several draws as a mean in a band from least to most."""
    for i, name in enumerate(candidates(pruning)):
        curve = pruning[pruning["scorer"] == name].sort_values("heads_removed")
        bars = errors(curve, "sequence_accuracy")
        style: Any = {"label": name, "capsize": 2, "markersize": 5, "elinewidth": 1, **line_style(i)}
        axes.errorbar(curve["heads_removed"], curve["sequence_accuracy"], bars, **style)
    for name in controls(pruning):
        draw_band(axes, pruning[pruning["scorer"] == name])


def head_scores(tables: Tables) -> Plot | None:
    """Heat maps of the scores: site and layer × head, a panel and a colour scale per scorer."""
    heads = tables.get("heads", pd.DataFrame(columns=["scorer", "draw"]))
    names = candidates(heads)
    if not names:
        return None
    rows = heads[["site", "layer"]].drop_duplicates()
    labels = [f"{SITE_LABELS[site]} {layer}" for site, layer in rows.itertuples(index=False)]
    heads_of_row = sorted(heads["head"].unique())
    width = max(0.44 * len(heads_of_row), 1.75) + 0.15
    columns = columns_of(len(names), max(1, min(4, int(14 / width))))
    figure = Figure(figsize=(1.3 + width * columns, 0.5 + (0.6 + 0.3 * len(rows)) * -(-len(names) // columns)))
    for axes, name in zip(panels(figure, len(names), columns, "head"), names, strict=True):
        table = heads[heads["scorer"] == name].pivot_table(index=["site", "layer"], columns="head", values="score")
        values = table.reindex(index=pd.MultiIndex.from_frame(rows), columns=heads_of_row).to_numpy(float)
        exponent, decimals = _unit(values)
        values = values / 10.0**exponent
        image = axes.imshow(values, cmap="cividis", aspect="auto")
        write_cells(axes, image, values, partial(number, decimals=decimals))
        axes.set_title(f"{name}\n× {power_of_ten(exponent)}" if exponent else name)
        axes.set(xticks=range(len(heads_of_row)), xticklabels=heads_of_row, yticks=range(len(rows)), yticklabels=labels)
        axes.grid(visible=False)
    caption = (
        "Importance of every head, by its site and layer; each scorer in its own colour scale and, where its title"
        " says so, in powers of ten. Brighter is more important."
    )
    return Plot("heads", caption, figure)


def _unit(values: np.ndarray) -> tuple[int, int]:
    """The power of ten and the decimals in which the largest of the values shows three digits."""
    largest = float(np.nanmax(np.abs(values), initial=0.0))
    size = floor(log10(largest)) if 0 < largest < np.inf else 0
    return (0, 2 - max(size, 0)) if -1 <= size <= 2 else (size, 2)


def agreement(tables: Tables) -> Plot | None:
    """Every scorer against ablation, head by head, with Spearman's rank correlation."""
    if "heads" not in tables or "agreement" not in tables:
        return None
    heads, pairs = tables["heads"], tables["agreement"]
    names = candidates(heads)
    if REFERENCE not in names or len(names) < 2:
        return None
    others = [name for name in names if name != REFERENCE]
    reference = heads[heads["scorer"] == REFERENCE].set_index(["site", "layer", "head"])
    columns = columns_of(len(others), 4)
    figure = Figure(figsize=(1.2 + 3.4 * columns, 3.6 * -(-len(others) // columns)))
    grid = panels(figure, len(others), columns, "", "ablation: rise of the loss (nats)", sharey=True)
    for axes, name in zip(grid, others, strict=True):
        scores = heads[heads["scorer"] == name].set_index(["site", "layer", "head"])["score"]
        for i, site in enumerate(SITE_LABELS):
            if site in scores.index.get_level_values("site"):
                x, y = scores.loc[[site]], reference.loc[[site]]
                style: Any = {"color": COLOURS[i], "fmt": MARKERS[i], "markersize": 5, "elinewidth": 1}
                axes.errorbar(x, y["score"], 1.96 * y["stderr"], label=SITE_LABELS[site], **style)
        rho = with_reference(pairs, name)["spearman"]
        axes.set(title=f"Spearman ρ = {rho:.2f}", xlabel=f"{name} score")
        axes.set_yscale("symlog", linthresh=_linear_range(reference["score"]))
        axes.tick_params(labelbottom=True)
    grid[0].legend(loc="best")
    caption = (
        "Each head's score against what closing it really costs"
        " (logarithmic above the first tick; bars are 95 % intervals)."
    )
    return Plot("agreement", caption, figure)


def accuracy_latency(tables: Tables) -> Plot | None:
    """Exact match against measured decoding time relative to the dense model."""
    if "pruning" not in tables or "speedup" not in tables["pruning"] or "latency" not in tables:
        return None
    pruning = tables["pruning"].dropna(subset=["speedup"])
    figure = Figure(figsize=(7, 4.2))
    axes = figure.add_subplot()
    control = tables["latency"].set_index("scorer").loc["dense again"]
    floor = sorted([1 / control["speedup_q3"], 1 / control["speedup_q1"]])
    axes.axvspan(*floor, color=CONTROL_COLOUR, alpha=0.25, linewidth=0, label="dense against itself")
    names = candidates(tables["pruning"])
    for name in pruning["scorer"].unique():
        curve = pruning[pruning["scorer"] == name].sort_values("heads_removed")
        time = 1 / curve["speedup"]
        bars = np.abs(np.stack([time - 1 / curve["speedup_q3"], 1 / curve["speedup_q1"] - time]))
        if name in names:
            style = line_style(names.index(name))
        else:
            style = {"color": CONTROL_COLOUR, "marker": "x", "linestyle": "--"}
            name = f"{name} (first draw)"
        style |= {"label": name, "capsize": 2, "markersize": 5, "elinewidth": 1}
        axes.errorbar(time, curve["sequence_accuracy"], xerr=bars, **style)
    axes.set(xlabel="time of a greedy decoding, dense = 1", ylabel="exact match", ylim=(-0.03, 1.03))
    axes.legend()
    caption = (
        "Exact match against the time of one greedy decoding with a KV cache, heads really removed; left is faster."
        " Bars are quartiles over rounds in turn, the grey strip is the dense model timed against itself."
    )
    return Plot("latency", caption, figure)


def training_curve(tables: Tables) -> Plot | None:
    """Loss and held-out accuracy over training and, where there are gates, their way."""
    if "training" not in tables:
        return None
    training = tables["training"]
    gates = [column for column in training if column.startswith("gate_")]
    blocks = list(dict.fromkeys(column.rsplit(".", 1)[0] for column in gates))
    figure = Figure(figsize=(7, 3 + 2.3 * -(-len(blocks) // 3)))
    parts: Any = figure.subfigures(2, 1, height_ratios=[3, 2.3 * -(-len(blocks) // 3)]) if blocks else [figure]
    axes = parts[0].add_subplot()
    axes.plot(training["step"], training["loss"], color=COLOURS[0], label="training loss")
    axes.plot(training["step"], training["valid_loss"], color=COLOURS[0], linestyle="--", label="held-out loss")
    axes.set(xlabel="step", ylabel="loss (nats per token)", yscale="log")
    right = axes.twinx()
    right.plot(training["step"], training["valid_sequence_accuracy"], color=COLOURS[1], label="held-out exact match")
    right.set(ylabel="exact match", ylim=(-0.03, 1.03))
    right.spines["right"].set_visible(True)
    right.grid(visible=False)
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], loc="center right")
    if blocks:
        _draw_gates(parts[1], training, gates, blocks)
    return Plot(
        "training",
        "Training: loss and held-out accuracy" + ("; below, every head's gate over training." if blocks else "."),
        figure,
    )


def _draw_gates(figure: Any, training: pd.DataFrame, gates: list[str], blocks: list[str]) -> None:
    grid = panels(figure, len(blocks), min(3, len(blocks)), "step", "gate", sharex=True, sharey=True)
    for axes, block in zip(grid, blocks, strict=True):
        mine = [column for column in gates if column.rsplit(".", 1)[0] == block]
        for i, column in enumerate(mine):
            label = f"head {column.rsplit('.', 1)[1]}"
            line: Any = {"color": COLOURS[i % len(COLOURS)], "linestyle": ("-", "--", "-.", ":")[i % 4]}
            axes.plot(training["step"], training[column], label=label, **line)
        site, layer = block.removeprefix("gate_").split(".")
        axes.set_title(f"{SITE_LABELS[site]} {layer}")
    grid[0].legend(ncols=2, loc="best")


def _linear_range(values: pd.Series) -> float:
    """Where a symmetric logarithmic axis should turn linear: around the smaller of the scores."""
    return float(max(values.abs().quantile(0.25), 1e-6))
