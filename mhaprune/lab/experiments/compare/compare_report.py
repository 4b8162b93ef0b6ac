"""The report of `experiment=compare`: how good is each score or search, and at what cost?"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.heat_map import LOST, heat_map
from mhaprune.lab.reporting.names import quality_name
from mhaprune.lab.reporting.plots import CONTROL_COLOUR, Plot, elided, needs, number
from mhaprune.lab.reporting.sentences import over_runs, points_of
from mhaprune.statistics.intervals import LEAST_RUNS, student_interval
from mhaprune.tables import CHOOSE_QUALITY, ENDS, LABEL, QUALITY, SETTING, UNINFORMED, Tables

MOST_NAMES = 6
"""Largest number of methods to name in one sentence."""
MOST_COLUMNS = 3
"""Largest number of panels side by side."""
REGRET = "regret_quality"


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences about the best method on the choose split, at any cost and within few passes. They name the
    methods that tie with it on the report split, the cheapest of the best and the tied methods, and the methods that
    are better on the report split at 95 % confidence."""
    costs = passes(tables["methods"].set_index("scorer")).round()
    quality, unit = quality_name(tables), points_of(tables)
    for _, row in tables["winner"].drop_duplicates("choice").iterrows():
        limit, first = limit_words(row["most_passes"]), row["first"]
        tied, better = _listed(row["tied"]), _some(_listed(row["better"]))
        if tied:
            equal = costs[[first, *tied]].sort_values(kind="stable")
            named = [
                f"{name} ({_passes(cost) if i == 0 else f'{cost:,g}'})" for i, (name, cost) in enumerate(equal.items())
            ]
            yield f"{len(equal)} methods choose equally well {limit}: {_some(named)}; {row['choice']} is the cheapest."
            yield f"On the choose split {first} is first; on the report split all are within its noise in {quality}."
        else:
            yield f"{first} does best on the choose split {limit}."
        regret, low, high = (number(100 * row[f"{REGRET}{end}"], 1) for end in ENDS)
        yield (
            f"{row['choice']} costs {_passes(round(passes(row)))} (a backward pass counts two). On the report split its"
            f" heads lose {regret} {unit} of {quality} (95 % interval {low} to {high}) against the best subset"
            f"{'' if row['oracle'] == 'exact' else ' found'}, on average over the budgets."
        )
        if better:
            yield f"At 95 % confidence better than {first} on the report split: {better}."


def _passes(count: float) -> str:
    return f"{count:,g} {'pass' if count == 1 else 'passes'}"


def _listed(cell: object) -> list[str]:
    return cell.split(", ") if isinstance(cell, str) and cell else []


def _some(names: Sequence[str]) -> str:
    """Return the first `MOST_NAMES` names and the number of further names."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} others" if more > 0 else "")


def say_over_runs(tables: Tables) -> Iterator[str]:
    """Yield sentences for each task: the best method on the choose splits, within few passes and at any cost, and its
    regret with an interval over runs."""
    methods, winners, unit = tables["methods"], tables["winner"], points_of(tables)
    for task, runs in methods[methods["family"] != UNINFORMED].groupby("task", sort=False):
        dearest = runs.assign(passes=passes(runs)).groupby("scorer")["passes"].max()
        for limit in sorted(winners.loc[winners["task"] == task, "most_passes"].unique()):
            within = runs[runs["scorer"].map(dearest) <= limit]
            chosen, regrets = (
                within.pivot_table(index="label", columns="scorer", values=column, sort=False).dropna(axis="columns")
                for column in (CHOOSE_QUALITY, REGRET)
            )
            if len(chosen) < LEAST_RUNS or not chosen.shape[1]:
                continue
            first, *others = chosen.mean().sort_values(ascending=False, kind="stable").index
            line = (
                f"Over {len(chosen)} runs on {task} {first} is first on the choose splits {limit_words(limit)}: its"
                f" heads lose {over_runs(100 * regrets[first], unit)} of {quality_name(tables)} against the best"
                " subsets (mean over budgets and runs, 95 % interval over runs)"
            )
            if others:
                more = 100 * (regrets[others[0]] - regrets[first])
                low, high = student_interval(more)
                change = f"{over_runs(more, unit)} more" if more.mean() >= 0 else f"{over_runs(-more, unit)} less"
                line += f"; {others[0]} is second there, and its heads lose {change}"
                line += ", which is within the noise" if low <= 0 <= high else ""
            yield f"{line}."


def headline(tables: Tables) -> list[Number]:
    """Return the regret of the method chosen within few passes or, if none is that cheap, chosen at any cost."""
    row = tables["winner"].iloc[-1]
    low, high = (number(100 * row[f"{REGRET}{end}"], 1) for end in ENDS[1:])
    beside = f"95 % interval {low} to {high}; {row['choice']}, {limit_words(row['most_passes'])}"
    return [Number(f"{points_of(tables)} of regret", 100 * float(row[REGRET]), beside=beside)]


def passes(methods: Any) -> Any:
    """Return the cost of a row or of a whole table in forward passes over the score split; a backward pass counts
    two."""
    return methods["forward_passes"] + 2 * methods["backward_passes"]


def limit_words(most_passes: float) -> str:
    """Return a limit on the cost in words: "at any cost" or "with at most 64 forward passes"."""
    return "at any cost" if math.isinf(most_passes) else f"with at most {most_passes:g} forward passes"


@needs("pruning")
def regret_map(tables: Tables) -> Plot | None:
    """Draw how much quality each method loses against the best subset: for each budget, and on average beside the cost
    of the method. The best method is on top."""
    methods = tables["methods"].sort_values(REGRET, kind="stable")
    regrets = tables["pruning"].pivot_table(index="scorer", columns="heads_removed", values=REGRET, dropna=False)
    total = int(tables["pruning"]["heads_total"].max())
    regrets = 100 * regrets.reindex(methods["scorer"])[[n for n in regrets if 0 < n < total]]
    if regrets.empty:
        return None
    pruning = tables["pruning"].dropna(subset=[REGRET])
    best = (pruning[QUALITY] + pruning[REGRET]).groupby(pruning["heads_removed"]).max()  # of the best set of each size
    dense_quality = tables["pruning"].loc[tables["pruning"]["heads_removed"] == 0, QUALITY].max()
    hopeless = [n for n in regrets if best.get(n, np.inf) < dense_quality / 2]
    regrets[hopeless] = np.nan
    rows, width = len(regrets), max(0.48 * regrets.shape[1], 2.4)
    figure = plots.new_figure(figsize=(1.8 + width + 3.4, 1.5 + 0.31 * rows))
    map_axes, mean_axes = figure.subplots(1, 2, width_ratios=[width, 2.4])
    values, control = regrets.to_numpy(float), (methods["family"] == UNINFORMED).to_numpy()
    worst = np.nanmax(values[~control], initial=1.0)  # a control would use up the contrast
    colours: Any = {"cmap": LOST, "vmin": 0, "vmax": worst}
    chosen = set(tables["winner"]["choice"]) if "winner" in tables else set()
    names: Any = {"rows": [elided(name) for name in regrets.index], "columns": regrets.columns}
    lost = np.where(np.abs(values) >= 0.5, values, np.nan)
    heat_map(map_axes, np.maximum(values, 0), **names, write=partial(number, decimals=0), written=lost, **colours)
    map_axes.set(xlabel=f"heads removed, of {total}", title=f"{points_of(tables)} of {quality_name(tables)} lost")
    good = int((regrets.mean(axis=1) < 1).sum())
    figure.suptitle(f"{good} of {rows} methods choose heads within a {points_of(tables)[:-1]} of the best choice")
    for label, name in zip(map_axes.get_yticklabels(), regrets.index, strict=True):
        label.set_fontweight("bold" if name in chosen else "normal")
    means, bars = 100 * methods[REGRET].to_numpy(), 100 * plots.errors(methods, REGRET)
    for row, mean in enumerate(means):
        style: Any = {"color": CONTROL_COLOUR if control[row] else "black", "markersize": 4, "elinewidth": 1}
        mean_axes.errorbar(mean, row, xerr=bars[:, [row]], marker="o", **style)
    mean_axes.axvline(0, color="black", linewidth=0.8)
    mean_axes.set_xlim(
        right=min(plots.ceiling(100 * methods[f"{REGRET}_high"], methods["family"]), mean_axes.get_xlim()[1])
    )
    mean_axes.set(xlabel=points_of(tables), ylim=map_axes.get_ylim(), yticks=range(rows))
    mean_axes.yaxis.tick_right()
    costs = passes(methods)
    mean_axes.set_yticklabels(
        [f"{number(mean, 1)}, {cost:,.0f} pass{'es' * (cost != 1)}" for mean, cost in zip(means, costs, strict=True)]
    )
    mean_axes.tick_params(axis="y", length=0)
    mean_axes.set_title("mean with 95 % interval")
    caption = (
        f"{quality_name(tables).capitalize()} that the choices of each scorer or search lose on the report split to the"
        f" best subset of the same size, in {points_of(tables)}; white is less than half of one. The least is on top;"
        " at the right the mean over the budgets with its 95 % interval (a control far outside has a number only) and"
        " what the choices cost, in forward passes over the score split; a backward pass counts two."
    )
    if hopeless:
        caption += (
            " Grey columns: there even the best subset keeps less than half of it, and the title leaves them out."
        )
    if chosen:
        choices = tables["winner"].groupby("choice", sort=False)["most_passes"]
        which = (f"{name} {' and '.join(map(limit_words, limits))}" for name, limits in choices)
        caption += f" Bold is the cheapest of those that do best: {' and '.join(which)}."
    return Plot("regret", caption, figure)


@needs("methods")
def compare_methods(tables: Tables) -> Plot:
    """Draw the regret of each scorer against the best subset: a dot per run, and the mean with its interval."""
    methods = tables["methods"].dropna(subset=[REGRET])
    methods = methods.assign(
        points=100 * methods[REGRET], **{SETTING: methods[SETTING].fillna("").replace("", "all runs")}
    )
    chosen = methods.groupby("scorer", sort=False)[CHOOSE_QUALITY].mean()
    names = list(chosen.sort_values(ascending=False, kind="stable").index)
    settings = list(methods.groupby(SETTING, sort=False))
    row_of, alone = range(len(names)), len(settings) == 1
    size, xlabel = (
        (6.0 if alone else 3.5, 0.3 + 0.3 * len(names)),
        f"{points_of(tables)} lost on average (lower is better)",
    )
    figure, drawn = plots.panelled(len(settings), MOST_COLUMNS, size, (1.5, 1.2), xlabel, sharex=True)
    shown = methods[methods["points"] <= plots.ceiling(methods["points"], methods["family"])]
    groups = [runs for _, runs in shown.groupby([SETTING, "scorer"])["points"] if len(runs) >= LEAST_RUNS]
    ends = [end for runs in groups for end in student_interval(runs)]
    limits = plots.room_for(pd.concat([shown["points"], pd.Series([0.0])]), ends)
    for axes, (name, of_setting) in zip(drawn, settings, strict=True):
        runs = of_setting.groupby("scorer")["points"]
        means = runs.mean().reindex(names)
        few = of_setting[LABEL].nunique() < LEAST_RUNS
        intervals = np.array([student_interval(runs.get_group(name)) for name in names]) * (np.nan if few else 1)
        apart = 0.5 * ((runs.cumcount() + 0.5) / runs.transform("size") - 0.5)  # equal runs would cover each other
        places = of_setting["scorer"].map(names.index) + apart
        axes.scatter(of_setting["points"], places, s=24, linewidth=0, zorder=3, color=CONTROL_COLOUR, label="one run")
        axes.scatter(means, row_of, marker="|", s=220, linewidth=2.5, color="black", label="mean (95 % interval)")
        axes.hlines(row_of, intervals[:, 0], intervals[:, 1], color="black", linewidth=1)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(yticks=row_of, yticklabels=names, ylim=(len(names) - 0.4, -0.6), xlim=limits)
        axes.set_title(name if len(settings) > 1 else "")
        for row, mean in enumerate(means):
            if mean > limits[1]:
                where: Any = {"ha": "right", "va": "center", "zorder": 4, "bbox": {"color": "white", "pad": 1}}
                axes.annotate(f"{number(mean, 1)} →", (limits[1], row), color="#555555", **where)
    plots.legend_above(figure, drawn[0])
    caption = (
        f"{quality_name(tables).capitalize()} that each scorer's or search's choice of heads loses to the best subset,"
        " on average over the budgets: a small mark per run, a stroke for their mean, with its 95 % interval over three"
        " runs or more; on top what does best on the choose splits. A control far outside is given in words."
    )
    return Plot("methods", caption, figure)
