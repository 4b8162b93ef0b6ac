"""Tables in, figures out: no torch, no model, only what a run has written down."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Tables = Mapping[str, pd.DataFrame]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette, which survives the common forms of colour blindness."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
CONTROL_COLOUR = "#888888"
SITE_LABELS = {"encoder_self": "encoder self", "decoder_self": "decoder self", "cross": "cross"}
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "mhaprune",
}


@dataclass(frozen=True)
class Plot:
    """A figure with its file name and the sentence that says what is to be seen in it."""

    name: str
    caption: str
    figure: Figure

    @cached_property
    def png(self) -> bytes:
        """The figure as a file, byte for byte the same for the same tables."""
        return self._render("png", {"Software": None})

    @cached_property
    def svg(self) -> bytes:
        """The figure as a file, byte for byte the same for the same tables; its text is text."""
        return self._render("svg", {"Date": None})

    def _render(self, kind: str, metadata: dict[str, None]) -> bytes:
        buffer = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(buffer, format=kind, metadata=metadata, dpi=150)
        return buffer.getvalue()


def draw(tables: Tables) -> Iterator[Plot]:
    """Every figure that these tables of one run can fill."""
    yield from _draw(tables, (accuracy_curves, head_scores, agreement, accuracy_latency, training_curve))


def draw_comparison(tables: Tables) -> Iterator[Plot]:
    """Every figure that compares the runs in these tables; runs are told apart by the column `label`."""
    yield from _draw(tables, (compare_curves, compare_runs))


def _draw(tables: Tables, plots: tuple[Callable[[Tables], Plot | None], ...]) -> Iterator[Plot]:
    for plot in plots:
        with matplotlib.rc_context(STYLE):
            drawn = plot(tables)
        if drawn is not None:
            yield drawn


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
        "Exact match under greedy decoding on the report split after the lowest-scored heads were removed."
        " Bars are 95 % intervals over examples"
    )
    band = ", the grey line and band the mean and range of the random control." if len(_controls(pruning)) else "."
    return Plot("accuracy", caption + band, figure)


def _draw_curves(axes: Axes, pruning: pd.DataFrame, x: str = "heads_removed") -> None:
    """One line per scorer with its intervals; scorers of several draws as a mean in a band from least to most."""
    for i, name in enumerate(_candidates(pruning)):
        curve = pruning[pruning["scorer"] == name].sort_values(x)
        y = curve["sequence_accuracy"]
        errors = np.abs(np.stack([y - curve["sequence_accuracy_low"], curve["sequence_accuracy_high"] - y]))
        style = _style(i)
        axes.errorbar(curve[x], y, errors, label=name, capsize=2, markersize=5, elinewidth=1, **style)
    for name in _controls(pruning):
        band = pruning[pruning["scorer"] == name].groupby(x)["sequence_accuracy"].agg(["min", "mean", "max"])
        axes.fill_between(band.index, band["min"], band["max"], color=CONTROL_COLOUR, alpha=0.2, linewidth=0)
        draws = pruning.loc[pruning["scorer"] == name, "draw"].nunique()
        axes.plot(band.index, band["mean"], color=CONTROL_COLOUR, linestyle="--", label=f"{name} ({draws} draws)")


def head_scores(tables: Tables) -> Plot | None:
    """Heat maps of the scores: site and layer × head, a panel and a colour scale per scorer."""
    heads = tables.get("heads", pd.DataFrame(columns=["scorer", "draw"]))
    names = _candidates(heads)
    if not names:
        return None
    rows = heads[["site", "layer"]].drop_duplicates()
    labels = [f"{SITE_LABELS[site]} {layer}" for site, layer in rows.itertuples(index=False)]
    columns = sorted(heads["head"].unique())
    figure = Figure(figsize=(1.6 + len(names) * (1.3 + 0.62 * len(columns)), 1.4 + 0.42 * len(rows)))
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        table = heads[heads["scorer"] == name].pivot_table(index=["site", "layer"], columns="head", values="score")
        values = table.reindex(pd.MultiIndex.from_frame(rows)).to_numpy()
        image = axes.imshow(values, cmap="cividis", aspect="auto")
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                colour = "white" if value <= middle else "black"
                axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=8, color=colour)
        axes.set(title=name, xlabel="head", xticks=range(len(columns)), xticklabels=columns, yticks=range(len(rows)))
        axes.set_yticklabels(labels if axes.get_subplotspec().is_first_col() else [])
        axes.grid(visible=False)
        figure.colorbar(image, ax=axes, fraction=0.08, pad=0.03)
    caption = (
        "Importance of every head, by its site and layer; each scorer in its own unit and colour scale,"
        " higher is more important."
    )
    return Plot("heads", caption, figure)


def agreement(tables: Tables) -> Plot | None:
    """Every scorer against ablation, head by head, with Spearman's rank correlation."""
    if "heads" not in tables or "agreement" not in tables:
        return None
    heads, pairs = tables["heads"], tables["agreement"]
    names = _candidates(heads)
    if "ablation" not in names or len(names) < 2:
        return None
    others = [name for name in names if name != "ablation"]
    reference = heads[heads["scorer"] == "ablation"].set_index(["site", "layer", "head"])
    figure = Figure(figsize=(1.2 + 3.4 * len(others), 3.6))
    for axes, name in zip(figure.subplots(1, len(others), squeeze=False, sharey=True)[0], others, strict=True):
        scores = heads[heads["scorer"] == name].set_index(["site", "layer", "head"])["score"]
        for i, site in enumerate(SITE_LABELS):
            if site in scores.index.get_level_values("site"):
                x, y = scores.loc[[site]], reference.loc[[site]]
                style = {"color": COLOURS[i], "fmt": MARKERS[i], "markersize": 5, "elinewidth": 1}
                axes.errorbar(x, y["score"], 1.96 * y["stderr"], label=SITE_LABELS[site], **style)
        pair = pairs[pairs["scorer"].isin([name, "ablation"]) & pairs["other"].isin([name, "ablation"])]
        axes.set(title=f"Spearman ρ = {pair['spearman'].iloc[0]:.2f}", xlabel=f"{name} score")
        axes.set_yscale("symlog", linthresh=_linear_range(reference["score"]))
    first = figure.axes[0]
    first.set_ylabel("ablation: rise of the loss (nats)")
    first.legend(loc="best", fontsize=9)
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
    candidates = _candidates(tables["pruning"])
    for name in pruning["scorer"].unique():
        curve = pruning[pruning["scorer"] == name].sort_values("heads_removed")
        time = 1 / curve["speedup"]
        errors = np.abs(np.stack([time - 1 / curve["speedup_q3"], 1 / curve["speedup_q1"] - time]))
        if name in candidates:
            style = _style(candidates.index(name))
        else:
            style = {"color": CONTROL_COLOUR, "marker": "x", "linestyle": "--"}
            name = f"{name} (first draw)"
        axes.errorbar(
            time, curve["sequence_accuracy"], xerr=errors, label=name, capsize=2, markersize=5, elinewidth=1, **style
        )
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


def _draw_gates(figure: Figure, training: pd.DataFrame, gates: list[str], blocks: list[str]) -> None:
    grid = figure.subplots(-(-len(blocks) // 3), min(3, len(blocks)), squeeze=False, sharex=True, sharey=True)
    for axes, block in zip(grid.flat, blocks, strict=False):
        for i, column in enumerate(column for column in gates if column.rsplit(".", 1)[0] == block):
            axes.plot(
                training["step"],
                training[column],
                color=COLOURS[i % len(COLOURS)],
                label=f"head {column.rsplit('.', 1)[1]}",
            )
        site, layer = block.removeprefix("gate_").split(".")
        axes.set_title(f"{SITE_LABELS[site]} {layer}", fontsize=10)
        if axes.get_subplotspec().is_last_row():
            axes.set_xlabel("step")
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("gate")
    for axes in list(grid.flat)[len(blocks) :]:
        axes.set_visible(False)
    if grid.flat[0].get_legend_handles_labels()[0][:9]:
        grid.flat[0].legend(fontsize=7, ncols=2, loc="best")


def compare_curves(tables: Tables) -> Plot | None:
    """Exact match against the share of heads removed: a panel per scorer, a line per run."""
    if "pruning" not in tables:
        return None
    pruning = tables["pruning"]
    names, labels = list(pruning["scorer"].unique()), list(pruning["label"].unique())
    columns = min(2, len(names))
    figure = Figure(figsize=(1 + 3.6 * columns, 0.6 + 2.9 * -(-len(names) // columns)))
    grid = figure.subplots(-(-len(names) // columns), columns, squeeze=False, sharex=True, sharey=True)
    for axes, name in zip(grid.flat, names, strict=False):
        for label, run in pruning[pruning["scorer"] == name].groupby("label", sort=False):
            means = run.groupby("fraction_removed")["sequence_accuracy"].agg(["min", "mean", "max"])
            style = _style(labels.index(label))
            axes.plot(means.index, means["mean"], label=label, markersize=4, **style)
            if run["draw"].nunique() > 1:
                axes.fill_between(
                    means.index, means["min"], means["max"], color=style["color"], alpha=0.12, linewidth=0
                )
        axes.set(title=name, ylim=(-0.03, 1.03))
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("exact match")
        if axes.get_subplotspec().is_last_row():
            axes.set_xlabel("share of heads removed")
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    lines = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
    figure.legend([lines[label] for label in labels], labels, loc="outside upper center", ncols=4)
    caption = (
        "Exact match on the report split against the share of heads removed, by scorer and run;"
        " bands span the draws of a control."
    )
    return Plot("comparison", caption, figure)


def compare_runs(tables: Tables) -> Plot | None:
    """What can go and what that brings, run by run: heads within tolerance, speed-up, agreement with ablation."""
    if "summary" not in tables:
        return None
    summary = tables["summary"]
    measures = {
        "heads that can go (share)": summary["heads_removed"] / summary["heads_total"],
        "speed-up there": summary["speedup"],
        "Spearman ρ with ablation": summary["spearman_with_ablation"],
    }
    labels = list(summary["label"].unique())
    names = list(summary["scorer"].unique())
    figure = Figure(figsize=(9.5, 1.5 + 0.22 * len(labels) * (1 + len(names))))
    for axes, (title, values) in zip(figure.subplots(1, len(measures), sharey=True), measures.items(), strict=True):
        for i, name in enumerate(names):
            mine = summary["scorer"] == name
            places = [labels.index(label) + 0.8 * (i + 0.5) / len(names) - 0.4 for label in summary.loc[mine, "label"]]
            axes.barh(places, values[mine], height=0.75 / len(names), color=COLOURS[i % len(COLOURS)], label=name)
        axes.set(title=title, yticks=range(len(labels)), yticklabels=labels)
        axes.axvline(1.0 if title.startswith("speed") else 0.0, color="black", linewidth=0.8)
    figure.axes[0].invert_yaxis()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    tolerance = summary["tolerance"].max()
    caption = f"The largest budget that loses at most {tolerance:g} of exact match on the choose split, run by run."
    return Plot("runs", caption, figure)


def _style(i: int) -> dict[str, Any]:
    """The colour and marker of the i-th line of a figure."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def _candidates(frame: pd.DataFrame) -> list[str]:
    """Scorers that give one order of the heads, in the order of the table."""
    return [name for name in frame["scorer"].unique() if name not in _controls(frame)]


def _controls(frame: pd.DataFrame) -> list[str]:
    """Scorers that draw several orders."""
    draws = frame.groupby("scorer", sort=False)["draw"].nunique()
    return list(draws.index[draws > 1])


def _linear_range(values: pd.Series) -> float:
    """Where a symmetric logarithmic axis should turn linear: around the smaller of the scores."""
    return float(max(values.abs().quantile(0.25), 1e-6))
