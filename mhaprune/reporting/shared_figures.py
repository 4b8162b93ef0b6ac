"""Figures that several experiments draw from tables of the same names."""

from collections.abc import Mapping
from math import isnan
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from mhaprune.heads import SITES
from mhaprune.reporting import plots
from mhaprune.reporting.plots import COLOURS, MARKERS, Plot, needs
from mhaprune.scorers.agreement import with_reference
from mhaprune.statistics.intervals import LEAST_RUNS, skewed_ends, student_interval
from mhaprune.tables import (
    HEAD,
    LABEL,
    MOMENTS,
    QUALITY,
    REFERENCE,
    SETTING,
    Tables,
    candidates,
    in_brackets,
    quality_name,
)

MOST_LINES = 12
"""Largest number of lines in one panel."""
MOST_IN_TITLE = 4
"""Largest number of scorers in the title of a figure, the best first."""


@needs("heads", "agreement")
def agreement(tables: Tables) -> Plot | None:
    """Draw the cost of closing each head against its rank by another scorer: panels with Spearman's correlation."""
    heads, pairs = tables["heads"], tables["agreement"]
    others = [name for name in candidates(heads) if name != REFERENCE]
    reference = heads[heads["scorer"] == REFERENCE].set_index(HEAD)
    costs = reference["score"].dropna()
    if not others or costs.empty:
        return None
    sites = list(dict.fromkeys([*SITES, *heads["site"]]))  # mhaprune's own sites keep their colours
    label = f"ablation: rise of the loss{in_brackets(tables)}"
    figure, grid = plots.panelled(len(others), 4, (3.4, 3.6), (1.2, 0.3), "", label, sharey=True)
    rhos = {name: with_reference(pairs, name) for name in others}
    for axes, name in zip(grid, others, strict=True):
        scores = heads[heads["scorer"] == name].set_index(HEAD)["score"]
        for i, site in enumerate(sites):
            if site in scores.index.get_level_values("site"):
                x, y = scores.rank().loc[[site]], reference.loc[[site]]
                low, high = skewed_ends(y[MOMENTS].to_numpy().T)
                style: Any = {"color": COLOURS[i % len(COLOURS)], "fmt": MARKERS[i % len(MARKERS)], "markersize": 5}
                bars = [y["score"] - low, high - y["score"]]
                axes.errorbar(x, y["score"], bars, label=SITES.get(site, site), elinewidth=1, **style)
        rho = rhos[name]
        title = "no rank correlation" if isnan(rho) else f"Spearman ρ = {plots.number(rho, 2)}"
        axes.set(title=title, xlabel=plots.wrapped(f"rank by {name}", 3.2))
        axes.tick_params(labelbottom=True)
    near_zero = max(costs.abs().quantile(0.25), 1e-3 * costs.abs().max(), 1e-6)
    grid[0].set_yscale("symlog", linthresh=10.0 ** np.ceil(np.log10(near_zero)))
    plots.plain_ticks(grid[0].yaxis)
    best = max(rhos, key=lambda name: -2 if isnan(rhos[name]) else rhos[name])
    order = f"{best} orders the heads most like ablation" if len(others) > 1 else f"How {best} orders the heads"
    title = order if isnan(rhos[best]) else f"{order}: rank correlation {plots.number(rhos[best], 2)}"
    plots.legend_above(figure, grid[0], title)
    caption = (
        "What closing each head really costs against its rank by another score, the most important one at the right;"
        " the axis is in proportion near 0 and logarithmic beyond, bars are 95 % intervals over examples, where there"
        " are enough for one."
    )
    return Plot("agreement", caption, figure)


@needs("pruning")
def compare_curves(tables: Tables) -> Plot | None:
    """Draw exact match against the share of heads removed: a panel per scorer, and a line per setting, the mean of its
    runs. None if there are too many settings to tell apart."""
    pruning = tables["pruning"].assign(**{SETTING: setting_names(tables["pruning"])})
    styles = {label: plots.line_style(i) for i, label in enumerate(pruning[SETTING].unique())}
    if len(styles) > MOST_LINES:
        return None
    names = list(pruning["scorer"].unique())
    few = len(names) <= 4
    labels, size = ("share of heads removed", quality_name(tables)), (3.6, 2.9) if few else (2.5, 2.1)
    figure, grid = plots.panelled(len(names), 2 if few else 4, size, (1.0, 0.6), *labels, sharex=True, sharey=True)
    for axes, name in zip(grid, names, strict=True):
        own = pruning[pruning["scorer"] == name]
        for label, style in styles.items():
            _draw_mean_curve(axes, own[own[SETTING] == label], label, style)
        axes.set(ylim=(-0.03, 1.03), xticks=(0, 0.25, 0.5, 0.75, 1), xticklabels=("0", "", "0.5", "", "1"))
        axes.set_title(name, fontsize=12 if few else 10)
    lines = {line.get_label(): line for axes in grid for line in axes.get_lines()}
    half = pruning["fraction_removed"].sub(0.5).abs()
    near = pruning[half == half.groupby([pruning[SETTING], pruning["scorer"]]).transform("min")]
    means = near.groupby("scorer")[QUALITY].mean().sort_values(ascending=False, kind="stable")[:MOST_IN_TITLE]
    title = f"Mean {quality_name(tables)} without half of the heads: "
    title += ", ".join(f"{name} {plots.number(mean, 2)}" for name, mean in means.items())
    plots.legend_above(figure, [lines[label] for label in styles if label in lines], title)
    caption = f"{quality_name(tables).capitalize()} on the report split against the share of heads removed, by scorer."
    if (pruning.groupby(SETTING)[LABEL].nunique() > 1).any():
        caption += " Lines are means over runs that differ only in their seed, a small point each; with three runs or"
        caption += " more, bars are 95 % intervals."
    else:
        caption += " A line per run; small points are the draws of a control."
    return Plot("comparison", caption, figure)


def _draw_mean_curve(axes: Axes, rows: pd.DataFrame, label: str, style: Mapping[str, Any]) -> None:
    """Draw the mean of runs, or of the draws of a single run, and each of them as a point; for enough runs also the
    interval of the mean."""
    if rows.empty:
        return
    several = rows[LABEL].nunique() > 1
    each = rows.groupby([LABEL, "fraction_removed"])[QUALITY].mean() if several else rows.set_index("fraction_removed")
    each = (each if several else each[QUALITY]).reset_index()
    values = each.groupby("fraction_removed")[QUALITY]
    axes.plot(each["fraction_removed"], each[QUALITY], ".", markersize=3, alpha=0.6, color=style["color"])
    axes.plot(values.mean(), label=label, markersize=4, linewidth=1.3, **style)
    if rows[LABEL].nunique() >= LEAST_RUNS:
        ends = np.array([student_interval(own) for _, own in values]).T
        if rows[QUALITY].between(0, 1).all():  # a share stays between 0 and 1
            ends = np.clip(ends, 0, 1)
        axes.vlines(list(values.groups), *ends, color=style["color"], linewidth=1)


def setting_names(frame: pd.DataFrame) -> pd.Series:
    """Return the name of each row's setting: the label of its run without the seed."""
    return frame[SETTING].fillna("").replace("", "all runs")
