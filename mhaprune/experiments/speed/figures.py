"""The figures of `experiment=speed`: speed-up against heads removed, accuracy against time, where the time goes."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mhaprune.experiments.speed.words import judged
from mhaprune.reporting.labels import label_points
from mhaprune.reporting.plots import COLOURS, CONTROL_COLOUR, Plot, columns_of, legend_above, line_style, needs, panels
from mhaprune.tables import QUALITY, Tables, candidates, quality_name, timed_name

WHAT_LABELS = {"encoder": "encoder", "decoder": "decoder, KV cache", "both": "encoder and decoder"}
PART_COLOURS = {"attention": COLOURS[0], "feed_forward": COLOURS[5], "rest": CONTROL_COLOUR}
BUILT: Any = {"color": "black", "marker": "_", "markersize": 11, "linestyle": ""}
FRONT: Any = {"color": "black", "linewidth": 1, "marker": "o", "markersize": 10, "markerfacecolor": "none", "zorder": 1}
SIZE = ["batch_size", "source_length", "target_length"]


@needs("speed")
def speedup_curves(tables: Tables) -> Plot:
    """Speed-up against heads removed: a row of panels per part of the model, a column per width, a line per batch."""
    speed = tables["speed"]
    rows, columns = _whats(speed), list(speed["timed_d_model"].unique())
    figure = Figure(figsize=(1.2 + 2.9 * len(columns), 1.1 + 2.3 * len(rows)))
    xlabel = f"heads removed, of {int(speed['model_heads'].max())}"
    grid = panels(figure, len(rows) * len(columns), len(columns), xlabel, sharex=True, sharey="row")
    for i, axes in enumerate(grid):
        what, d_model = rows[i // len(columns)], columns[i % len(columns)]
        panel = speed[(speed["what"] == what) & (speed["timed_d_model"] == d_model)]
        low, high = panel["aa_ratio_q1"].min(), panel["aa_ratio_q3"].max()
        axes.axhspan(low, high, color=CONTROL_COLOUR, alpha=0.25, linewidth=0)
        for n, (_, line) in enumerate(panel.groupby(SIZE, sort=False)):
            removed, look = line["model_heads_removed"], line_style(n)
            bars = np.abs(line[["speedup_q1", "speedup_q3"]].to_numpy().T - line["speedup"].to_numpy())
            style: Any = {"capsize": 2, "markersize": 4, "elinewidth": 1, **look}
            axes.errorbar(removed, line["speedup"], bars, **style)
            axes.plot(removed, line["speedup"] * line["built_ratio"], **BUILT)
            axes.plot(removed, line["flop_ratio"], color=look["color"], linestyle=":", linewidth=1.2)
        axes.set_xticks(sorted(panel["model_heads_removed"].unique()))
        low, high = _limits(speed[speed["what"] == what])
        axes.set_ylim(low, high)
        beyond = panel[panel["speedup_q3"] > high]
        for removed in beyond["model_heads_removed"]:
            axes.annotate("↑", (removed, high), ha="center", va="top", fontsize=9)
        if i < len(columns):
            axes.set_title(f"d_model {d_model}")
        if i % len(columns) == 0:
            axes.set_ylabel(f"{WHAT_LABELS[what]}\nspeed-up (×)")
    labels = [_size(size, speed) for size in speed.loc[speed["what"] == rows[-1], SIZE].drop_duplicates().itertuples()]
    handles: list[Any] = [Line2D([], [], label=label, markersize=4, **line_style(n)) for n, label in enumerate(labels)]
    handles += [
        Line2D([], [], label="a model built so", **BUILT),
        Line2D([], [], color="#555555", linestyle=":", label="if time went by FLOPs"),
        Line2D([], [], color=CONTROL_COLOUR, alpha=0.4, linewidth=7, label="dense against itself"),
    ]
    legend_above(figure, handles)
    caption = (
        "Speed-up when heads are really removed, evenly from all blocks, against the dense model in turn; bars are"
        " quartiles over rounds. Black dashes are models built with as few heads from the start, the most that removal"
        " can reach; the dotted line is what counting operations would promise, the grey strip the dense model timed"
        " against itself; an arrow stands for a bar that is longer than its panel. Once no cross-attention has a head"
        " the encoder need not run."
    )
    return Plot("speedup", caption, figure)


def _limits(rows: pd.DataFrame) -> tuple[float, float]:
    """The ends of an axis with room for all bars, unless one is far longer than the speed-ups: that one leaves it."""
    most = rows[["speedup", "flop_ratio"]].max(axis=None)
    low, high = min(0.7, 0.95 * rows["speedup_q1"].min()), min(rows["speedup_q3"].max(), 1.5 * most)
    return max(low, 0.0), 1.08 * max(high, most)


@needs("tradeoff")
def accuracy_milliseconds(tables: Tables) -> Plot:
    """Exact match against milliseconds of a greedy decoding, with the Pareto front."""
    tradeoff = judged(tables["tradeoff"], tables)
    batches, names = list(tradeoff["batch_size"].unique()), candidates(tables.get("pruning", tradeoff))
    columns = columns_of(len(batches), 2)
    figure = Figure(figsize=(0.8 + 4.4 * columns, 0.7 + 3.5 * -(-len(batches) // columns)))
    names_of_axes = f"milliseconds of {timed_name(tables)}", quality_name(tables)
    grid = panels(figure, len(batches), columns, *names_of_axes, sharey=True)
    fronts = []
    for axes, batch_size in zip(grid, batches, strict=True):
        models = tradeoff[tradeoff["batch_size"] == batch_size]
        for name in models["scorer"].unique():
            points = models[models["scorer"] == name]
            style: Any = {"color": CONTROL_COLOUR, "marker": "x"}
            label = f"{name} (first draw)"
            if name in names:
                style, label = line_style(names.index(name)), name
            low, high = (points["latency_ms"] * points["speedup"] / points[f"speedup_{q}"] for q in ("q3", "q1"))
            bars = np.abs(np.stack([points["latency_ms"] - low, high - points["latency_ms"]]))
            style |= {"label": label, "linestyle": "", "markersize": 5, "elinewidth": 1, "capsize": 2}
            axes.errorbar(points["latency_ms"], points[QUALITY], xerr=bars, **style)
        front = models[models["on_front"]].sort_values("latency_ms").drop_duplicates("removed")
        x, y = front["latency_ms"].to_numpy(), front[QUALITY].to_numpy()
        axes.plot(x, y, label="Pareto front", **FRONT)
        slowest = models["latency_ms"].max()
        longest = (models["latency_ms"] * models["speedup"] / models["speedup_q1"]).max()
        axes.set(title=f"batch {batch_size}", ylim=(-0.06, 1.12), xlim=(0, 1.05 * min(longest, 1.6 * slowest)))
        axes.tick_params(labelbottom=True)
        fronts.append((axes, [f"−{removed}" for removed in front["heads_removed"]], x, y))
    legend_above(figure, grid[0])
    for axes, labels, x, y in fronts:
        label_points(axes, labels, x, y, np.zeros((2, len(x))))
        for text in axes.texts:
            text.set_bbox({"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.5})
    caption = (
        f"{quality_name(tables).capitalize()} of the model on the report split against the time of"
        f" {timed_name(tables)}, heads really removed. Rings and line are the Pareto front as the choose split has it,"
        " with the number of heads removed; bars are quartiles of the ratio to the dense model, round by round."
    )
    return Plot("tradeoff", caption, figure)


@needs("parts")
def time_by_part(tables: Tables) -> Plot:
    """The share of attention, feed-forward and the rest in the dense model's time, a panel per part of the model."""
    parts = tables["parts"]
    whats, sizes = _whats(parts), ["timed_d_model", *SIZE]
    most = max(len(parts.loc[parts["what"] == what, sizes].drop_duplicates()) for what in whats)
    figure = Figure(figsize=(1.6 + 2.9 * len(whats), 1.2 + 0.34 * most))
    grid = panels(figure, len(whats), len(whats), "share of the time", sharex=True)
    for axes, what in zip(grid, whats, strict=True):
        rows = parts[parts["what"] == what]
        wide = rows.pivot_table(index=sizes, columns="part", values=["share", "part_ms"], sort=False)
        left = np.zeros(len(wide))
        for part, colour in PART_COLOURS.items():
            share = wide["share"][part].to_numpy()
            axes.barh(range(len(wide)), share, left=left, color=colour, height=0.75, label=part.replace("_", "-"))
            for y, (start, width) in enumerate(zip(left, share, strict=True)):
                if width > 0.13:
                    text: Any = {"ha": "center", "va": "center", "fontsize": 9}
                    axes.text(
                        start + width / 2, y, f"{width:.0%}", color="white" if part == "attention" else "black", **text
                    )
            left += share
        for y, milliseconds in enumerate(wide["part_ms"].sum(axis=1)):
            axes.text(1.02, y, f"{milliseconds:.3g} ms", va="center", fontsize=9)
        labels = [
            f"d_model {size.timed_d_model}, {_size(size, parts)}"
            for size in wide.index.to_frame().itertuples(index=False)
        ]
        axes.set_yticks(range(len(wide)), labels)
        axes.tick_params(labelleft=axes is grid[0])
        axes.set(title=WHAT_LABELS[what], xlim=(0, 1.22), xticks=(0, 0.25, 0.5, 0.75, 1))
        axes.invert_yaxis()
        axes.grid(visible=False)
    legend_above(figure, grid[0])
    caption = (
        "Where the dense model's time goes; attention's part holds its normalisation, projections and cache."
        " If it took no time and the rest stayed as it is, the whole would be 1 / (1 − share) times as fast."
    )
    return Plot("parts", caption, figure)


def _whats(frame: pd.DataFrame) -> list[str]:
    return [what for what in WHAT_LABELS if (frame["what"] == what).any()]


def _size(size: Any, frame: pd.DataFrame) -> str:
    """The batch size and, if they differ in the table, the lengths."""
    label = f"batch {size.batch_size}"
    if len(frame.loc[frame["target_length"] > 0, SIZE[1:]].drop_duplicates()) > 1:
        label += f", {size.source_length}" + (f" → {size.target_length} tokens" if size.target_length else " tokens")
    return label
