"""The figures that compare many scorers and searches: how good is each, at what cost, and do the scorers agree?"""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from mhaprune.experiments.compare.words import limit_words, passes
from mhaprune.reporting.heat_map import ALIKE, LOST, heat_map, similar_order
from mhaprune.reporting.labels import label_points
from mhaprune.reporting.plots import (
    CONTROL_COLOUR,
    Plot,
    ceiling,
    columns_of,
    draw_band,
    elided,
    errors,
    legend_above,
    line_style,
    needs,
    number,
    panels,
)
from mhaprune.reporting.shared_figures import mean_over_runs, setting_names
from mhaprune.reporting.whiskers import room_for
from mhaprune.statistics.intervals import student_interval
from mhaprune.tables import CHOOSE_QUALITY, QUALITY, SETTING, UNINFORMED, Tables, quality_name

MOST_LINES = 6
"""More curves in one panel cannot be told apart."""
MOST_COLUMNS = 3
"""Panels side by side."""
MOST_LETTERS = 34
"""Letters of the title of a panel."""
LONG_NAME = 22
"""Letters. Two columns of longer names are wider than their panel."""
MOST_NUMBERS = 12
"""Rows and columns of a matrix with a number in every cell."""
REGRET = "regret_quality"
BEST: Any = {"color": "#F0E442", "linewidth": 8, "solid_capstyle": "butt", "zorder": 1.5}
"""Broad and bright, below the curves: they often coincide with it."""


@needs("pruning")
def method_curves(tables: Tables) -> Plot:
    """Exact match against heads removed: a panel per family of scorers, each with the best subset and the control."""
    pruning, groups = tables["pruning"], _panels_of(tables["methods"])
    oracle = tables.get("oracle", pd.DataFrame(columns=["objective", "heads_removed"]))
    oracle = oracle[oracle["objective"] == QUALITY].sort_values("heads_removed")
    budgets, columns = sorted(pruning["heads_removed"].unique()), columns_of(len(groups), 2)
    figure = Figure(figsize=(7, 4.4) if len(groups) == 1 else (8.4, 0.5 + 3.2 * -(-len(groups) // columns)))
    label = f"heads removed, of {int(pruning['heads_total'].max())}"
    grid = panels(figure, len(groups), columns, label, quality_name(tables), sharex=True, sharey=True)
    for axes, (title, names) in zip(grid, groups.items(), strict=True):
        for _, curves in pruning[pruning["family"] == UNINFORMED].groupby("scorer", sort=False):
            draw_band(axes, curves)
        if len(oracle):
            axes.plot(oracle["heads_removed"], oracle[QUALITY], label=best_subset(oracle), **BEST)
        limits = [line.get_label() for line in axes.get_lines()]
        lines = []
        for i, name in enumerate(names):
            curve = pruning[pruning["scorer"] == name].sort_values("heads_removed")
            style: Any = {"elinewidth": 0.8, "linewidth": 1.2, "markersize": 4, **line_style(i)}
            bars = errors(curve, QUALITY)
            lines.append(axes.errorbar(curve["heads_removed"], curve[QUALITY], bars, label=elided(name, 24), **style))
        axes.set(ylim=(-0.03, 1.03))
        if len(budgets) <= 10:
            axes.set_xticks(budgets)
        # above the curves, which may fill every corner
        place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "alignment": "left", "borderaxespad": 0.2}
        long = sum(len(name) > LONG_NAME for name in names)
        axes.legend(handles=lines, title=title, ncols=1 if long > 1 else 2, columnspacing=1, **place)
    shared = [line for line in grid[0].get_lines() if line.get_label() in limits]
    legend_above(figure, shared)
    beside = ["the best choice of heads in yellow"] if len(oracle) else []
    beside += ["random ones in grey (mean and range)"] if (pruning["family"] == UNINFORMED).any() else []
    caption = (
        f"{quality_name(tables).capitalize()} on the report split after the lowest-scored heads were removed, or those"
        " that a search found;"
        f" {', '.join([*beside, 'bars are 95 % intervals over examples'])}."
    )
    return Plot("accuracy", caption, figure)


@needs("pruning")
def regret_map(tables: Tables) -> Plot | None:
    """Draw the loss of each choice against the best subset, by budget and on average, the best on top."""
    if REGRET not in tables["pruning"]:
        return None
    methods = tables["methods"].sort_values(REGRET, kind="stable")
    regrets = tables["pruning"].pivot_table(index="scorer", columns="heads_removed", values=REGRET, dropna=False)
    total = int(tables["pruning"]["heads_total"].max())
    regrets = 100 * regrets.reindex(methods["scorer"])[[n for n in regrets if 0 < n < total]]
    if regrets.empty:
        return None
    rows, width = len(regrets), max(0.48 * regrets.shape[1], 2.4)
    figure = Figure(figsize=(1.8 + width + 2.6, 1.2 + 0.31 * rows))
    left, right = figure.subplots(1, 2, width_ratios=[width, 2.4])
    values = regrets.to_numpy(float)
    judged = values[(methods["family"] != UNINFORMED).to_numpy()]  # a control would use up the contrast
    worst = np.nanmax(judged, initial=1.0)
    winners = tables.get("winner", pd.DataFrame(columns=["choice", "most_passes"]))
    chosen = set(winners["choice"])
    rows_named = [f"▸ {elided(name)}" if name in chosen else elided(name) for name in regrets.index]
    names: Any = {"rows": rows_named, "columns": regrets.columns}
    heat_map(left, values, **names, write=partial(number, decimals=0), cmap=LOST, vmin=0, vmax=worst)
    left.set(xlabel=f"heads removed, of {total}", title=f"regret in {quality_name(tables)} (points)")
    for label, name in zip(left.get_yticklabels(), regrets.index, strict=True):
        label.set_fontweight("bold" if name in chosen else "normal")
    end = ceiling(100 * methods[f"{REGRET}_high"], methods["family"])
    means, bars = 100 * methods[REGRET], 100 * errors(methods, REGRET)
    for row, (mean, family) in enumerate(zip(means, methods["family"], strict=True)):
        style: Any = {"color": CONTROL_COLOUR if family == UNINFORMED else "black", "markersize": 4, "elinewidth": 1}
        right.errorbar(mean, row, xerr=bars[:, [row]], marker="o", **style)
        if mean > end:
            right.set_xlim(right=end)
            right.annotate("→", (end, row), ha="right", va="center", color=CONTROL_COLOUR)
    right.axvline(0, color="black", linewidth=0.8)
    right.set(xlabel="percentage points", ylim=left.get_ylim(), yticks=range(rows))
    right.yaxis.tick_right()
    right.set_yticklabels([number(mean, 1) for mean in means])
    right.tick_params(axis="y", length=0)
    right.set_title("mean, 95 % interval")
    caption = (
        f"{quality_name(tables).capitalize()} that each scorer's or search's choice loses to the best subset of the"
        " same size, in percentage points; the darker the red, the more is lost. All numbers are of the"
        " report split. The least regret is on top; at the right the mean over the budgets with its 95 % interval, an"
        " arrow where a control lies far outside."
    )
    if chosen:
        which = " and ".join(f"{row.choice} {limit_words(row.most_passes)}" for row in winners.itertuples())
        caption += f" In bold is the cheapest of those that do best, and so is chosen: {which}."
    return Plot("regret", caption, figure)


@needs("agreement")
def agreement_matrix(tables: Tables) -> Plot:
    """Spearman's rank correlation of every two scorers over the heads, similar ones side by side."""
    pairs = tables["agreement"]
    shown = {*pairs["scorer"], *pairs["other"]}
    names = [name for name in tables["methods"]["scorer"] if name in shown]
    values = np.eye(len(names))
    values[values == 0] = np.nan
    for scorer, other, rho in pairs[["scorer", "other", "spearman"]].itertuples(index=False):
        if scorer in names and other in names:
            i, j = names.index(scorer), names.index(other)
            values[i, j] = values[j, i] = rho
    order = similar_order(values)
    names, values = [names[i] for i in order], values[np.ix_(order, order)]
    fits = len(names) <= MOST_NUMBERS
    size = (0.36 if fits else 0.26) * len(names)
    figure = Figure(figsize=(2.6 + max(size, 1.6), 1.9 + max(size, 1.2)))
    axes = figure.add_subplot()
    numbers = np.where(np.eye(len(names)) == 1, np.nan, values)
    colours: Any = {"cmap": ALIKE, "vmin": -1, "vmax": 1}
    write = (lambda rho: number(rho, 2).replace("0.", ".")) if fits else None
    shown_names = [elided(name) for name in names]
    image = heat_map(axes, values, rows=shown_names, columns=shown_names, write=write, written=numbers, **colours)
    axes.tick_params(axis="x", rotation=90)
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.set_label("Spearman ρ: −1 opposite, 1 alike")
    caption = (
        "How alike two scorers rank the heads: Spearman's ρ from −1 (red, opposite) over 0 (white) to 1 (blue, alike);"
        " grey where one of them cannot rank. Those that rank alike stand side by side."
    )
    return Plot("agreement", caption, figure)


def best_subset(oracle: pd.DataFrame) -> str:
    """The name of the best choice of heads. It is certainly the best only if all subsets were tried."""
    exact = oracle.empty or (oracle["kind"] == "exact").all()
    return "best subset" if exact else "best subset found"


def _panels_of(methods: pd.DataFrame) -> dict[str, list[str]]:
    """Panel titles and the scorers in them: families, those of one scorer together, none of more than `MOST_LINES`."""
    methods = methods[methods["family"] != UNINFORMED]
    if len(methods) <= MOST_LINES:
        return {"": list(methods["scorer"])}
    families = {family: list(names) for family, names in methods.groupby("family", sort=False)["scorer"]}
    alone = [family for family, names in families.items() if len(names) == 1]
    groups = {family: names for family, names in families.items() if family not in alone}
    if alone:
        title = ", ".join(alone) if len(", ".join(alone)) <= MOST_LETTERS else f"{len(alone)} families"
        groups[title] = [families[family][0] for family in alone]
    parts = {}
    for title, names in groups.items():
        size = columns_of(len(names), MOST_LINES)  # parts as equal as possible
        starts = range(0, len(names), size)
        for part, start in enumerate(starts, start=1):
            numbered = f"{title} ({part} of {len(starts)})" if len(starts) > 1 else title
            parts[numbered] = names[start : start + size]
    return parts


@needs("methods")
def compare_methods(tables: Tables) -> Plot:
    """Draw how far every scorer stays behind the best subset: a dot per run, a mark and an interval for their mean."""
    methods = tables["methods"].dropna(subset=[REGRET])
    methods = methods.assign(points=100 * methods[REGRET], **{SETTING: setting_names(methods)})
    chosen = methods.groupby("scorer", sort=False)[CHOOSE_QUALITY].mean()
    names = list(chosen.sort_values(ascending=False, kind="stable").index)
    settings = list(methods.groupby(SETTING, sort=False))
    columns = columns_of(len(settings), MOST_COLUMNS)
    rows = -(-len(settings) // columns)
    figure = Figure(figsize=(7.5 if columns == 1 else 1.5 + 3.5 * columns, 1.2 + rows * (0.3 + 0.3 * len(names))))
    xlabel = f"mean regret in {quality_name(tables)} (percentage points, lower is better)"
    drawn = panels(figure, len(settings), columns, xlabel if columns == 1 else "mean regret (points)", sharex=True)
    shown = methods[methods["points"] <= ceiling(methods["points"], methods["family"])]
    ends = [end for _, runs in shown.groupby([SETTING, "scorer"])["points"] for end in student_interval(runs)]
    limits = room_for(pd.concat([shown["points"], pd.Series([0.0])]), ends)
    for axes, (name, own) in zip(drawn, settings, strict=True):
        if len(settings) > 1:
            axes.set_title(name)
            own = own.assign(label="one run")
        means = mean_over_runs(axes, own, "scorer", "points", names, limits)
        for row, mean in enumerate(means):
            if mean > limits[1]:
                where: Any = {"ha": "right", "va": "center", "zorder": 4, "bbox": {"color": "white", "pad": 1}}
                axes.annotate(f"{number(mean, 1)} →", (limits[1], row), color="#555555", **where)
    legend_above(figure, drawn[0])
    caption = (
        f"How much {quality_name(tables)} each scorer's or search's choice of heads loses to the best subset, on"
        " average over the budgets:"
        " a small mark per run, a bar for their mean with its 95 % interval over runs, which ends in an arrow where"
        " it leaves the panel; on top what does best on the choose splits. A control far outside is given in words."
        " Runs with other settings have a panel of their own."
    )
    return Plot("methods", caption, figure)


@needs("methods")
def quality_cost(tables: Tables) -> Plot | None:
    """Mean regret against what a choice costs, every point with its name; down and left is better."""
    methods = tables["methods"].dropna(subset=[REGRET])
    if methods.empty:
        return None
    x = passes(methods).to_numpy(float)
    figure = Figure(figsize=(8, 5.8))
    axes = figure.add_subplot()
    y, bars = 100 * methods[REGRET].to_numpy(), 100 * errors(methods, REGRET)
    top = ceiling(100 * methods[f"{REGRET}_high"], methods["family"])
    above = y > top
    short = methods["scorer"].map(lambda name: elided(name, 14) if len(name) > LONG_NAME + 2 else name)
    names = [f"{name} (↑ {number(at, 1)})" if up else name for name, at, up in zip(short, y, above, strict=True)]
    y, bars = np.where(above, top, y), np.where(above, 0.0, bars)
    axes.axhline(0, color="black", linewidth=1.2, label=best_subset(tables.get("oracle", pd.DataFrame())))
    for limit in _limits(tables):
        axes.axvline(limit, color="black", linewidth=0.8, linestyle=":", zorder=0, label=f"{limit:g} passes")
    families = list(methods["family"].unique())
    known = [family for family in families if family != UNINFORMED]
    for family in families:
        members = (methods["family"] == family).to_numpy()
        style = line_style(known.index(family)) if family in known else {"color": CONTROL_COLOUR, "marker": "x"}
        style |= {"linestyle": "none", "markersize": 6, "elinewidth": 0.8}
        axes.errorbar(x[members], y[members], bars[:, members], label=family, **style)
    axes.set_xlabel("cost in forward passes (a backward counts two)")
    axes.set_ylabel(f"mean regret in {quality_name(tables)} (percentage points)")
    _scale(axes, x, np.concatenate([y - bars[0], y + bars[1]]))
    figure.legend(loc="outside upper center", ncols=5, columnspacing=1.2, handletextpad=0.4)
    label_points(axes, names, x, y, bars)
    caption = (
        "What a choice of heads loses to the best subset, on average over the budgets, against the cost of its scores"
        " or its search in passes over the score split, for all budgets together. Down and left is better; both"
        " axes are linear up to 1 and logarithmic beyond. Bars are 95 % intervals. An arrow and a number stand for a"
        " control far above."
    )
    if _limits(tables):
        caption += " The headline compares what stands left of the dotted line with all there is."
    return Plot("cost", caption, figure)


def _scale(axes: Axes, cost: np.ndarray, ends: np.ndarray) -> None:
    """Make both axes linear up to 1, where costs of zero and the best choices lie, and logarithmic beyond."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.4)
    axes.set_xlim(-0.6 if (cost == 0).any() else 0.5 * cost.min(), 2.5 * max(cost.max(), 1))
    axes.xaxis.set_major_formatter(lambda tick, _: f"{tick:,.6g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yscale("symlog", linthresh=1, linscale=0.7)
    axes.set_yticks([sign * tick for tick in (0, 1, 2, 5, 10, 20, 50, 100) for sign in (1, -1) if tick or sign == 1])
    axes.yaxis.set_major_formatter(lambda tick, _: number(tick, 0))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(min(1.3 * ends.min(), -0.5), max(1.3 * ends.max(), 1.5))


def _limits(tables: Tables) -> list[float]:
    """The costs up to which choices are compared apart from dearer ones."""
    limits = tables["winner"]["most_passes"] if "winner" in tables else pd.Series(dtype=float)
    return limits[np.isfinite(limits)].tolist()
