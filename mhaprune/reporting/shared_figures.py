"""Figures that several experiments draw from tables of the same names."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, isnan, log10, nan
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from mhaprune.heads import SITES
from mhaprune.reporting.plots import (
    COLOURS,
    CONTROL_COLOUR,
    MARKERS,
    Plot,
    columns_of,
    correlation,
    legend_above,
    line_style,
    needs,
    panels,
    room_for,
    wrapped,
)
from mhaprune.reporting.settings import styles_of
from mhaprune.scorers.agreement import with_reference
from mhaprune.statistics.intervals import skewed_ends, student_interval
from mhaprune.tables import (
    HEAD,
    LABEL,
    MOMENTS,
    QUALITY,
    REFERENCE,
    SETTING,
    Tables,
    candidates,
    loss_unit,
    quality_name,
)

PILED = 10
"""Ratio of the largest score to the median, beyond which a linear axis would pile the others up."""
MOST_TICKS = 7
"""Powers of ten at an axis."""
MOST_LINES = 12
"""Lines of one panel."""


@needs("heads", "agreement")
def agreement(tables: Tables) -> Plot | None:
    """Every scorer against ablation, head by head, with Spearman's rank correlation."""
    heads, pairs = tables["heads"], tables["agreement"]
    names = candidates(heads)
    if REFERENCE not in names or len(names) < 2:
        return None
    others = [name for name in names if name != REFERENCE]
    reference = heads[heads["scorer"] == REFERENCE].set_index(HEAD)
    if reference["score"].isna().all():
        return None
    sites = list(dict.fromkeys([*SITES, *heads["site"]]))  # ours keep their colours
    columns, unit = columns_of(len(others), 4), loss_unit(tables)
    figure = Figure(figsize=(1.2 + 3.4 * columns, 0.3 + 3.6 * -(-len(others) // columns)))
    grid = panels(
        figure, len(others), columns, "", f"ablation: rise of the loss{f' ({unit})' if unit else ''}", sharey=True
    )
    for axes, name in zip(grid, others, strict=True):
        scores = heads[heads["scorer"] == name].set_index(HEAD)["score"]
        for i, site in enumerate(sites):
            if site in scores.index.get_level_values("site"):
                x, y = scores.loc[[site]], reference.loc[[site]]
                style: Any = {"color": COLOURS[i % len(COLOURS)], "fmt": MARKERS[i % len(MARKERS)]}
                style |= {"markersize": 5, "elinewidth": 1}
                low, high = skewed_ends(y[MOMENTS].to_numpy().T)
                bars = [y["score"] - low, high - y["score"]]
                axes.errorbar(x, y["score"], bars, label=SITES.get(site, site), **style)
        rho = with_reference(pairs, name)
        axes.set(title=_rank_correlation(rho, scores), xlabel=wrapped(f"{name} score", 3.2))
        _scale_logarithmic(axes.yaxis, reference["score"].dropna())
        if scores.abs().max() > PILED * scores.abs().median() > 0:
            linear = _scale_logarithmic(axes.xaxis, scores.dropna())
            if not isnan(linear):
                margin = 0.4 * linear
                axes.set_xlim(1.6 * min(scores.min(), 0.0) - margin, 1.6 * max(scores.max(), 0.0) + margin)
        axes.tick_params(labelbottom=True)
    legend_above(figure, grid[0])
    caption = (
        "Each head's score against what closing it really costs"
        " (axes with powers of ten are linear near 0; bars are 95 % intervals over examples; where there is none, too"
        " few examples make the score to say)."
    )
    return Plot("agreement", caption, figure)


def _rank_correlation(rho: float, scores: pd.Series) -> str:
    """Spearman's correlation with ablation, or why there is none."""
    if not isnan(rho):
        return f"Spearman ρ = {correlation(rho)}"
    if len(scores) < 2:
        return "one head: no ranks to compare"
    return "all scores equal: no ranks to compare" if scores.nunique() == 1 else "no rank correlation"


def _scale_logarithmic(axis: XAxis | YAxis, values: pd.Series) -> float:
    """Make an axis linear near the smaller values and logarithmic beyond, with ticks that have room. Returns the end of
    the linear range; NaN where the values reach no two powers of ten, so that the axis stays linear."""
    linear, largest = float(max(values.abs().quantile(0.25), 1e-6)), float(values.abs().max())
    exponents = range(ceil(log10(linear)), floor(log10(max(largest, linear))) + 1)
    if len(exponents) < 2:
        return nan
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("symlog", linthresh=linear)
    powers = [10.0**exponent for exponent in exponents][:: -(-len(exponents) // MOST_TICKS)]
    negative = [-power for power in powers if power <= -values.min()]
    axis.set_ticks([*negative, 0.0, *powers])
    axis.set_minor_locator(NullLocator())
    return linear


@needs("pruning")
def compare_curves(tables: Tables) -> Plot | None:
    """Exact match against the share of heads removed: a panel per scorer, a line per setting for the mean of its runs.
    None where more settings differ than can be told apart."""
    pruning = tables["pruning"].assign(**{SETTING: setting_names(tables["pruning"])})
    styles = styles_of(pruning[SETTING].unique())
    if len(styles) > MOST_LINES:
        return None
    names = list(pruning["scorer"].unique())
    columns = columns_of(len(names), 2 if len(names) <= 4 else 4)
    width, height = (3.6, 2.9) if columns <= 2 else (2.5, 2.1)
    figure = Figure(figsize=(1 + width * columns, 0.6 + height * -(-len(names) // columns)))
    grid = panels(figure, len(names), columns, "share of heads removed", quality_name(tables), sharex=True, sharey=True)
    for axes, name in zip(grid, names, strict=True):
        own = pruning[pruning["scorer"] == name]
        for label, style in styles.items():
            _draw_mean_curve(axes, own[own[SETTING] == label], label, style)
        axes.set(ylim=(-0.03, 1.03), xticks=(0, 0.25, 0.5, 0.75, 1), xticklabels=("0", "", "0.5", "", "1"))
        axes.set_title(name, fontsize=10 if columns > 2 else 12)
    lines = {line.get_label(): line for axes in grid for line in axes.get_lines()}
    legend_above(figure, [lines[label] for label in styles if label in lines])
    caption = f"{quality_name(tables).capitalize()} on the report split against the share of heads removed, by scorer."
    if (pruning.groupby(SETTING)[LABEL].nunique() > 1).any():
        caption += " Lines are means over runs that differ only in their seed, bands their 95 % intervals, of three"
        caption += " or more."
    else:
        caption += " A line per run; bands span the draws of a control."
    return Plot("comparison", caption, figure)


def _draw_mean_curve(axes: Axes, rows: pd.DataFrame, label: str, style: Mapping[str, Any]) -> None:
    """The mean of runs with its interval; of a single run the mean of its draws, from the least to the most."""
    if rows.empty:
        return
    several = rows[LABEL].nunique() > 1
    own = rows.groupby([LABEL, "fraction_removed"])[QUALITY].mean() if several else rows.set_index("fraction_removed")
    values = (own if several else own[QUALITY]).groupby("fraction_removed")
    means = values.mean()
    low, high = np.array([student_interval(each) if several else (each.min(), each.max()) for _, each in values]).T
    axes.plot(means.index, means, label=label, markersize=4, **style)
    if rows[QUALITY].between(0, 1).all():  # a share stays one
        low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    shade = {"color": style["color"], "alpha": 0.12, "linewidth": 0}
    axes.fill_between(means.index, low, high, **shade)


def setting_names(frame: pd.DataFrame) -> pd.Series:
    """Return the names of the runs of the rows without their seeds."""
    return frame[SETTING].fillna("").replace("", "all runs")


def mean_over_runs(
    axes: Axes,
    frame: pd.DataFrame,
    row: str,
    value: str,
    names: Sequence[str],
    limits: tuple[float, float] | None = None,
) -> pd.Series:
    """Draw a row for each of `names`: a mark per run, a bar for their mean with its 95 % interval; returns the means.

    `frame` holds a `value` for every run, its column `label`, and name, its column `row`. `limits` are the ends of the
    x axis, by default those with room for all runs.
    """
    labels = list(frame["label"].unique())
    means = frame.groupby(row)[value].mean().reindex(names)
    intervals = np.array([student_interval(frame.loc[frame[row] == name, value]) for name in names])
    rows = range(len(names))
    axes.scatter(means, rows, marker="|", s=220, linewidth=2.5, color="black", label="mean, 95 % interval over runs")
    axes.hlines(rows, intervals[:, 0], intervals[:, 1], color="black", linewidth=1)
    told_apart = len(labels) <= len(COLOURS) - 1  # black is the mean's
    in_row = frame.groupby(row)[value]
    shifts = 0.5 * ((in_row.cumcount() + 0.5) / in_row.transform("size") - 0.5)  # equal runs would hide each other
    for i, (label, run) in enumerate(frame.groupby("label", sort=False)):
        style = line_style(i) if told_apart else {"color": CONTROL_COLOUR, "marker": "o"}
        places = [names.index(name) for name in run[row]] + shifts[run.index]
        name = label if told_apart else "one run" if i == 0 else None
        axes.scatter(run[value], places, s=24, linewidth=0, zorder=3, label=name, **style)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(yticks=rows, yticklabels=names, ylim=(len(names) - 0.4, -0.6))
    axes.set_xlim(limits or room_for(pd.concat([frame[value], pd.Series([0.0])]), intervals.flat))
    return means
