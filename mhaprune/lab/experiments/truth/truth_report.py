"""The report of `experiment=truth`: which scores find the heads that are known to matter?"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.names import unit_name
from mhaprune.lab.reporting.plots import CONTROL_COLOUR, Plot, elided, needs, number
from mhaprune.statistics.intervals import student_interval
from mhaprune.tables import ENDS, HEAD, SETTING, UNINFORMED, Tables

PATCHED = "patching"
"""Where heads are known from if the model names none."""


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences about the score that finds the known heads best, those that do so for less, and those that do
    not find them better than chance."""
    table, units = tables["truth"], unit_name(tables)
    scores = table[table["family"] != UNINFORMED]
    count, source = int(table["heads_known"].iloc[0]), SOURCES.get(table["known_from"].iloc[0], "known")
    if scores.empty:
        yield "Only controls were tried, which know nothing of the model."
        return
    best, total = scores.iloc[0], len(tables["known"])
    found = f", {100 * best['recall']:.0f} % of them among its first {count}" if count > 1 else ""
    yield (
        f"{best['scorer']} is best at finding the {count} of {total} {units} that {source}: area under ROC"
        f" {_interval(best, 'auroc')}{found}."
    )
    within = scores[scores["auroc"] >= best["auroc"] - 0.02]
    costs = within["forward_passes"] + 2 * within["backward_passes"]
    if costs.min() < costs[best.name] / 2:
        cheap = within.loc[costs.idxmin()]
        yield (
            f"{cheap['scorer']} does nearly as well with {costs.min():g} passes instead of {costs[best.name]:g}:"
            f" {_interval(cheap, 'auroc')}."
        )
    if len(chance := scores[~(scores["auroc_low"].fillna(scores["auroc"]) > 0.5)]):
        yield f"No better than chance at this: {', '.join(chance['scorer'])}."


SOURCES = {
    "construction": "were set by hand to matter",
    "publication": "a publication names",
    "alignment": "align source and answer",
    PATCHED: "matter most by exact patching on the report split",
}
"""What is said of the known heads, by where they are known from."""


def _interval(row: pd.Series, column: str) -> str:
    found, low, high = (number(row[f"{column}{end}"], 2) for end in ENDS)
    return found if np.isnan(row[f"{column}_low"]) else f"{found} (95 % interval over examples {low} to {high})"


def headline(tables: Tables) -> list[Number]:
    """Return the area under ROC of each score."""
    scores = tables["truth"][tables["truth"]["family"] != UNINFORMED]
    return [Number("area under ROC", float(row["auroc"]), beside=row["scorer"]) for _, row in scores.head(1).iterrows()]


@needs("truth")
def areas(tables: Tables) -> Plot:
    """Draw the area under ROC and the recall of each score, with intervals."""
    table = tables["truth"][::-1].reset_index(drop=True)
    figure = plots.new_figure(figsize=(8.2, 1.3 + 0.3 * len(table)))
    panels = figure.subplots(1, 2, sharey=True)
    count = int(table["heads_known"].iloc[0])
    names = {"auroc": "area under ROC", "recall": f"found among the first {count}"}
    for axes, (column, label) in zip(panels, names.items(), strict=True):
        bars = plots.errors(table, column)
        for row, (value, family) in enumerate(zip(table[column], table["family"], strict=True)):
            colour = CONTROL_COLOUR if family == UNINFORMED else "black"
            axes.errorbar(value, row, xerr=bars[:, [row]], marker="o", markersize=5, color=colour, elinewidth=1.2)
        axes.set(xlabel=label, xlim=(-0.03, 1.03), yticks=range(len(table)))
    panels[0].set_yticklabels([elided(name) for name in table["scorer"]])
    panels[0].axvline(0.5, color=CONTROL_COLOUR, linewidth=1, linestyle="--")
    chance = count / len(tables["known"])
    panels[1].axvline(chance, color=CONTROL_COLOUR, linewidth=1, linestyle="--")
    source = SOURCES.get(table["known_from"].iloc[0], "are known")
    scores = table[table["family"] != UNINFORMED]
    best = (scores if len(scores) else table)["scorer"].iloc[-1]
    complete = int((scores["recall"] == 1).sum())
    figure.suptitle(
        f"{complete} of {len(scores)} scores rank first what matters: {count} of {len(tables['known'])}"
        if complete
        else f"{best} ranks the {unit_name(tables)} that matter best"
    )
    caption = (
        f"How well each score finds the {count} of {len(tables['known'])} {unit_name(tables)} that {source}. Left: the"
        " probability that one of them has a higher score than another; right: the share of them among as many with the"
        " highest scores. Lines are 95 % intervals over redraws of the examples, of a control over its draws; a score"
        " that reads no examples has no line."
        " Dashed is chance."
    )
    return Plot("truth", caption, figure)


@needs("heads", "known")
def ranks(tables: Tables) -> Plot:
    """Draw the rank that each score gives to each known head."""
    known = tables["known"]
    heads = tables["heads"][tables["heads"]["draw"] == 0].merge(known[[*HEAD, "role", "known"]], on=HEAD)
    order = [name for name in tables["truth"]["scorer"] if name in set(heads["scorer"])][::-1]
    shown = known.loc[known["role"].fillna("") != "", ["role", "known"]].drop_duplicates("role")
    roles = list(shown.sort_values("known", ascending=False, kind="stable")["role"])
    figure = plots.new_figure(figsize=(8.2, 1.5 + 0.3 * len(order)))
    axes = figure.subplots()
    for i, role in enumerate(roles):
        mine = heads[heads["role"] == role]
        style: Any = {**plots.line_style(i), "s": 30, "linewidth": 0, "alpha": 0.8}
        axes.scatter(mine["rank"], mine["scorer"].map(order.index), **style)
        axes.scatter([], [], **style, label=role)
    axes.set(xlabel=f"rank of the {unit_name(tables)[:-1]}, 1 is the most important", yticks=range(len(order)))
    axes.set_yticklabels([elided(name) for name in order])
    axes.set_xlim(0, len(known) + 1)
    last = heads[heads["known"]].groupby("scorer")["rank"].max().reindex(order[::-1]).dropna()
    first = f"{last.idxmin()} has all {unit_name(tables)} that matter among its first" if len(last) else ""
    plots.legend_above(figure, axes, f"{first} {last.min():.0f}" if first else "")
    caption = (
        f"Where each score puts the {unit_name(tables)} whose work is known; those that matter should be at the left,"
        " all others at the right."
    )
    return Plot("truth_ranks", caption, figure)


@needs("truth")
def over_runs(tables: Tables) -> Plot:
    """Draw the area under ROC of each score over several runs: the mean over the runs of each setting."""
    table = tables["truth"].assign(**{SETTING: tables["truth"][SETTING].fillna("").replace("", "all runs")})
    means = table.groupby("scorer")["auroc"].mean().sort_values()
    settings, names = list(table[SETTING].unique()), list(means.index)
    figure = plots.new_figure(figsize=(7.0, 1.5 + 0.3 * len(names)))
    axes = figure.subplots()
    for i, setting in enumerate(settings):
        runs = table[table[SETTING] == setting].groupby("scorer")["auroc"]
        found, style = runs.mean().reindex(names), plots.line_style(i)
        ends = np.array(
            [student_interval(runs.get_group(name)) if name in runs.groups else (np.nan,) * 2 for name in names]
        )
        places = np.arange(len(names)) + 0.5 * ((i + 0.5) / len(settings) - 0.5)
        axes.hlines(places, ends[:, 0], ends[:, 1], color=style["color"], linewidth=1.2)
        axes.scatter(found, places, **style, s=26, linewidth=0, label=setting)
    axes.axvline(0.5, color=CONTROL_COLOUR, linewidth=1, linestyle="--")
    axes.set(xlabel="area under ROC", xlim=(-0.03, 1.03), yticks=range(len(names)))
    axes.set_yticklabels([elided(name) for name in names])
    plots.legend_above(figure, axes)
    caption = (
        "How well each score finds the heads that are known to matter: the mean over the runs of a setting, with its"
        " 95 % interval over three runs or more. Dashed is chance."
    )
    return Plot("truth_over_runs", caption, figure)
