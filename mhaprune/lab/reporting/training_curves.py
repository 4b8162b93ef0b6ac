"""The course of training: a figure of loss, accuracy and gates."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from mhaprune.heads import HeadId
from mhaprune.lab.model.sites import block_label
from mhaprune.lab.reporting.plots import COLOURS, Plot, legend_above, needs, new_figure, panels, plain_ticks
from mhaprune.lab.reporting.sentences import share
from mhaprune.tables import GATE, VALID_QUALITY, Tables

MOST_NAMED = 12
"""Largest number of gates in a legend. More lines cannot be told apart."""
DASHES = ("-", "--", "-.", ":")


@needs("training")
def training_curve(tables: Tables) -> Plot:
    """Draw loss and held-out accuracy during training and, if the model has gates, their values."""
    training = tables["training"]
    gates = {HeadId.parse(name.removeprefix(GATE)): name for name in training if name.startswith(GATE)}
    blocks = list(dict.fromkeys((head.site, head.layer) for head in gates))
    height = 0.3 + 2 * -(-len(blocks) // 3)
    figure = new_figure(figsize=(8.4, 3.2 + height * bool(blocks)))
    parts: Any = figure.subfigures(2, 1, height_ratios=[2.9, height]) if blocks else [figure]
    loss, quality = parts[0].subplots(1, 2)
    _draw_progress(loss, training, {"loss": "training loss", "valid_loss": "held-out loss"})
    loss.set(xlabel="step", ylabel="loss (nats per token)", yscale="log")
    plain_ticks(loss.yaxis)
    _draw_progress(quality, training, {VALID_QUALITY: ""})
    quality.set(xlabel="step", ylabel="exact match", ylim=(-0.03, 1.03))
    last = training.iloc[-1]
    title = f"After {last['step']:.0f} steps {share(last[VALID_QUALITY])} of held-out answers are right"
    legend_above(parts[0], loss, title)
    caption = "Training: the loss at the left, with a logarithmic axis, the share of right answers at the right"
    if blocks:
        _draw_gates(parts[1], training, gates, blocks)
        caption += "; below, every head's gate, a panel for each block"
    return Plot("training", f"{caption}.", figure)


def _draw_progress(axes: Axes, training: pd.DataFrame, lines: Mapping[str, str]) -> None:
    """Draw columns of the table as lines."""
    for (column, label), dash in zip(lines.items(), ("-", "--"), strict=False):
        known = training.dropna(subset=column)  # there is no training loss before the first step
        marker = "o" if len(known) == 1 else ""
        axes.plot(known["step"], known[column], marker=marker, color=COLOURS[0], linestyle=dash, label=label)


def _draw_gates(
    figure: Any, training: pd.DataFrame, gates: Mapping[HeadId, str], blocks: Sequence[tuple[str, int]]
) -> None:
    grid = panels(figure, len(blocks), min(3, len(blocks)), "step", "gate", sharex=True, sharey=True)
    shown: dict[int, Line2D] = {}
    for axes, block in zip(grid, blocks, strict=True):
        for head, column in gates.items():
            if head[:2] == block:
                look: Any = {"color": COLOURS[head.head % len(COLOURS)], "linestyle": DASHES[head.head % len(DASHES)]}
                (line,) = axes.plot(training["step"], training[column], label=f"head {head.head}", **look)
                shown.setdefault(head.head, line)
        axes.set_title(block_label(*block))
        axes.locator_params(nbins=4)
    if len(shown) <= MOST_NAMED:
        legend_above(figure, [shown[number] for number in sorted(shown)])
