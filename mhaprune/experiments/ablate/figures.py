"""The figures of one run: accuracy, scores, agreement with ablation, time, training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mhaprune.experiments.ablate.words import recoveries
from mhaprune.reporting.plots import (
    COLOURS,
    CONTROL_COLOUR,
    MOST_RUNS,
    Plot,
    draw_band,
    errors,
    legend_above,
    line_style,
)
from mhaprune.tables import NOTHING, QUALITY, SURE, Tables, candidates, quality_name, repeated_draws, timed_name


def accuracy_curves(tables: Tables) -> Plot | None:
    """The quality against heads removed, for every scorer, with the band of the random control."""
    if "pruning" not in tables:
        return None
    pruning = tables["pruning"]
    figure = Figure(figsize=(7, 4.2))
    axes = figure.add_subplot()
    _draw_curves(axes, pruning)
    _draw_recovered(axes, tables)
    sure = _mark_sure(axes, tables)
    total = int(pruning["heads_total"].max())
    axes.set(xlabel=f"heads removed, of {total}", ylabel=quality_name(tables), **limits(pruning))
    axes.set_xticks(sorted(pruning["heads_removed"].unique()))
    axes.legend()
    quality = quality_name(tables)
    caption = (
        f"{quality.capitalize()} on the report split after the heads that each chose were removed."
        " Bars are 95 % intervals over examples"
    )
    band = ", the grey line and band the mean and range of the random control." if len(repeated_draws(pruning)) else "."
    marked = " Rings: the most heads that surely can go, at 95 % confidence on the choose split." if sure else ""
    recovered = (
        " Dashed with open marks: the same heads gone, and what is left recovered." if "recovered" in tables else ""
    )
    return Plot("accuracy", caption + band + recovered + marked, figure)


def _draw_curves(axes: Axes, pruning: pd.DataFrame) -> None:
    """Draw a line with intervals per scorer, and a band from least to most with its mean per scorer of several
    draws."""
    for i, name in enumerate(candidates(pruning)):
        curve = pruning[pruning["scorer"] == name].sort_values("heads_removed")
        bars = errors(curve, QUALITY)
        style: Any = {"label": name, "capsize": 2, "markersize": 5, "elinewidth": 1, **line_style(i)}
        axes.errorbar(curve["heads_removed"], curve[QUALITY], bars, **style)
    for name in repeated_draws(pruning):
        draw_band(axes, pruning[pruning["scorer"] == name])


def _draw_recovered(axes: Axes, tables: Tables) -> None:
    """Beside the curve of a scorer the one after each recovery, in the same colour."""
    if "recovered" not in tables:
        return
    names = candidates(tables["pruning"])
    for i, ((name, scorer), curve) in enumerate(tables["recovered"].groupby(["recovery", "scorer"], sort=False)):
        curve = curve.sort_values("heads_removed")
        style = line_style(names.index(scorer)) if scorer in names else {"color": CONTROL_COLOUR, "marker": "x"}
        style |= {"label": f"{scorer}, then {name}", "capsize": 2, "markersize": 7, "elinewidth": 1}
        style |= {"linestyle": ("--", ":", "-.")[i % 3], "markerfacecolor": "none"}
        axes.errorbar(curve["heads_removed"], curve[QUALITY], errors(curve, QUALITY), **style)


def _mark_sure(axes: Axes, tables: Tables) -> bool:
    """Draw a ring on every curve where the heads end that can go surely; returns whether there is any."""
    summary = tables.get("summary", pd.DataFrame())
    if SURE not in summary:
        return False
    names = candidates(tables["pruning"])
    sure = summary[(summary[SURE] > 0) & summary["scorer"].isin(names)]
    inside = sure.groupby(SURE).cumcount()  # rings around one place stay apart by their size
    for (_, row), recovery, i in zip(sure.iterrows(), recoveries(sure), inside, strict=True):
        curves = tables["pruning"] if recovery == NOTHING else tables["recovered"].query("recovery == @recovery")
        point = curves[(curves["scorer"] == row["scorer"]) & (curves["heads_removed"] == row[SURE])]
        style: Any = {"color": line_style(names.index(row["scorer"]))["color"], "marker": "o", "markersize": 11 + 3 * i}
        axes.plot(point["heads_removed"], point[QUALITY], markerfacecolor="none", clip_on=False, **style)
    if len(sure):
        axes.plot([], [], "o", markerfacecolor="none", color="black", markersize=9, label="can go surely")
    return len(sure) > 0


def limits(pruning: pd.DataFrame) -> dict[str, Any]:
    """The ends of an axis for the quality: from 0 to 1 for a share, else as it comes."""
    share = pruning[QUALITY].between(0, 1).all()
    return {"ylim": (-0.03, 1.03)} if share else {}


def accuracy_latency(tables: Tables) -> Plot | None:
    """The quality against the measured time relative to the dense model."""
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
        axes.errorbar(time, curve[QUALITY], xerr=bars, **style)
    timed, quality = timed_name(tables), quality_name(tables)
    axes.set(xlabel=f"time of {timed}, dense = 1", ylabel=quality, **limits(pruning))
    axes.legend()
    caption = (
        f"{quality.capitalize()} against the time of {timed}, heads really removed; left is faster."
        " Bars are quartiles over rounds in turn, the grey strip is the dense model timed against itself."
    )
    return Plot("latency", caption, figure)


def compare_runs(tables: Tables) -> Plot | None:
    """What can go and what that brings, run by run: heads within tolerance, speed-up, agreement with ablation."""
    if "summary" not in tables or tables["summary"]["label"].nunique() > MOST_RUNS:
        return None
    summary = tables["summary"]
    recovered = recoveries(summary)
    summary = summary.assign(scorer=summary["scorer"].where(recovered == NOTHING, "after " + recovered))
    measures = {
        "heads that can go (share)": summary["heads_removed"] / summary["heads_total"],
        "speed-up there": summary["speedup"],
        "Spearman ρ with ablation": summary["spearman_with_ablation"].where(recovered == NOTHING),
    }
    labels = list(summary["label"].unique())
    names = list(summary["scorer"].unique())
    figure = Figure(figsize=(9.5, 1.5 + 0.22 * len(labels) * (1 + len(names))))
    for axes, (title, values) in zip(figure.subplots(1, len(measures), sharey=True), measures.items(), strict=True):
        for i, name in enumerate(names):
            rows = summary["scorer"] == name
            places = [labels.index(label) + 0.8 * (i + 0.5) / len(names) - 0.4 for label in summary.loc[rows, "label"]]
            axes.barh(places, values[rows], height=0.75 / len(names), color=COLOURS[i % len(COLOURS)], label=name)
        axes.set(title=title, yticks=range(len(labels)), yticklabels=labels)
        axes.axvline(1.0 if title.startswith("speed") else 0.0, color="black", linewidth=0.8)
    figure.axes[0].invert_yaxis()
    legend_above(figure, figure.axes[0])
    tolerance = summary["tolerance"].max()
    quality = quality_name(tables)
    caption = f"The largest budget that loses at most {tolerance:g} of {quality} on the choose split, run by run."
    if (recovered != NOTHING).any():
        caption += " Recovered are the models of the scorer that can remove the most heads without."
    return Plot("runs", caption, figure)
