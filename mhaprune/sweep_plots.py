"""The figures that compare runs, which are told apart by the column `label`."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from mhaprune.reporting.plots import (
    COLOURS,
    CONTROL_COLOUR,
    Plot,
    Tables,
    ceiling,
    columns_of,
    legend_above,
    line_style,
    number,
    panels,
)
from mhaprune.statistics import student_interval


def compare_methods(tables: Tables) -> Plot | None:
    """How far every scorer stays behind the best subset: a dot per run, a mark and an interval for their mean."""
    if "methods" not in tables:
        return None
    methods = tables["methods"].dropna(subset=["regret_sequence_accuracy"])
    by_scorer = methods.groupby("scorer", sort=False)
    chosen = by_scorer["choose_sequence_accuracy"].mean().sort_values(ascending=False, kind="stable")
    names, labels = list(chosen.index), list(methods["label"].unique())
    means = 100 * by_scorer["regret_sequence_accuracy"].mean()[names]
    intervals = np.array([student_interval(100 * by_scorer.get_group(n)["regret_sequence_accuracy"]) for n in names])
    figure = Figure(figsize=(7.5, 1.5 + 0.3 * len(names)))
    axes = figure.add_subplot()
    rows = range(len(names))
    axes.scatter(means, rows, marker="|", s=220, linewidth=2.5, color="black", label="mean, 95 % interval over runs")
    axes.hlines(rows, intervals[:, 0], intervals[:, 1], color="black", linewidth=1)
    told_apart = len(labels) <= len(COLOURS) - 1  # black is the mean's
    for i, (label, run) in enumerate(methods.groupby("label", sort=False)):
        shift = 0.5 * ((i + 0.5) / len(labels) - 0.5)  # equal runs would hide each other
        style = line_style(i) if told_apart else {"color": CONTROL_COLOUR, "marker": "o"}
        places = [names.index(name) + shift for name in run["scorer"]]
        name = label if told_apart else "one run" if i == 0 else None
        axes.scatter(100 * run["regret_sequence_accuracy"], places, s=24, linewidth=0, zorder=3, label=name, **style)
    end = ceiling(100 * methods["regret_sequence_accuracy"], methods["family"])
    for row, mean in enumerate(means):
        if mean > end:
            axes.set_xlim(right=end)
            axes.annotate(f"{number(mean, 1)} →", (end, row), ha="right", va="center", color="#555555")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(yticks=rows, yticklabels=names, ylim=(len(names) - 0.4, -0.6))
    axes.set_xlabel("mean regret in exact match (percentage points, lower is better)")
    legend_above(figure, axes)
    caption = (
        "How much exact match each scorer's choice of heads loses to the best subset, on average over the budgets:"
        " a small mark per run, a bar for their mean with its 95 % interval over runs; on top what does best on the"
        " choose splits. A control far outside is given in words."
    )
    return Plot("methods", caption, figure)


def compare_curves(tables: Tables) -> Plot | None:
    """Exact match against the share of heads removed: a panel per scorer, a line per run."""
    if "pruning" not in tables:
        return None
    pruning = tables["pruning"]
    names, labels = list(pruning["scorer"].unique()), list(pruning["label"].unique())
    columns = columns_of(len(names), 2 if len(names) <= 4 else 4)
    width, height = (3.6, 2.9) if columns <= 2 else (2.5, 2.1)
    figure = Figure(figsize=(1 + width * columns, 0.6 + height * -(-len(names) // columns)))
    grid = panels(figure, len(names), columns, "share of heads removed", "exact match", sharex=True, sharey=True)
    for axes, name in zip(grid, names, strict=True):
        for label, run in pruning[pruning["scorer"] == name].groupby("label", sort=False):
            means = run.groupby("fraction_removed")["sequence_accuracy"].agg(["min", "mean", "max"])
            style = line_style(labels.index(label))
            axes.plot(means.index, means["mean"], label=label, markersize=4, **style)
            if run["draw"].nunique() > 1:
                shade = {"color": style["color"], "alpha": 0.12, "linewidth": 0}
                axes.fill_between(means.index, means["min"], means["max"], **shade)
        axes.set(ylim=(-0.03, 1.03), xticks=(0, 0.25, 0.5, 0.75, 1), xticklabels=("0", "", "0.5", "", "1"))
        axes.set_title(name, fontsize=10 if columns > 2 else 12)
    lines = {line.get_label(): line for axes in grid for line in axes.get_lines()}
    legend_above(figure, [lines[label] for label in labels])
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
    legend_above(figure, figure.axes[0])
    tolerance = summary["tolerance"].max()
    caption = f"The largest budget that loses at most {tolerance:g} of exact match on the choose split, run by run."
    return Plot("runs", caption, figure)
