"""Sentences of `experiment=compare`, and its map of heads."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from mhaprune.reporting.head_map import Verdict, prunable_alone, scored
from mhaprune.reporting.headline import Number
from mhaprune.reporting.plots import number
from mhaprune.reporting.sentences import points_over_runs
from mhaprune.statistics.intervals import LEAST_RUNS, prunable, student_interval
from mhaprune.tables import CHOOSE_QUALITY, ENDS, MOMENTS, REFERENCE, UNINFORMED, Tables, quality_name

MOST_NAMES = 6
"""Names of methods in one sentence."""


def say(tables: Tables) -> Iterator[str]:
    """Say what does best at any cost and at few passes, and what one split for all would change."""
    winners, quality = tables["winner"], quality_name(tables)
    for _, row in winners.drop_duplicates("choice").iterrows():
        yield from _best(row, quality)
    row = winners.iloc[0]
    if not math.isnan(row["leak"]):
        yield (
            "Leak: with scoring, choosing and reporting on one split, the best choices by a score would have been"
            f" reported {100 * abs(row['leak']):.1f} points of {quality} {'higher' if row['leak'] >= 0 else 'lower'}"
            f" ({number(100 * row['leak_low'], 1)} to {number(100 * row['leak_high'], 1)})."
        )


def over_runs(tables: Tables) -> Iterator[str]:
    """Over the runs of each task: what does best on the choose splits, at few passes and at any cost, with intervals
    over runs."""
    methods, winners = tables["methods"], tables["winner"]
    for task, runs in methods[methods["family"] != UNINFORMED].groupby("task", sort=False):
        dearest = runs.assign(passes=passes(runs)).groupby("scorer")["passes"].max()
        for limit in sorted(winners.loc[winners["task"] == task, "most_passes"].unique()):
            within = runs[runs["scorer"].map(dearest) <= limit]
            chosen, regrets = (
                within.pivot_table(index="label", columns="scorer", values=column, sort=False).dropna(axis="columns")
                for column in (CHOOSE_QUALITY, "regret_quality")
            )
            if len(chosen) >= LEAST_RUNS and chosen.shape[1]:
                order = chosen.mean().sort_values(ascending=False, kind="stable").index
                said = _best_over_runs(100 * regrets[order], limit_words(limit), quality_name(tables))
                yield f"Over {len(chosen)} runs on {task} {said}."


def _best_over_runs(points: pd.DataFrame, limit: str, quality: str) -> str:
    """`points` holds a row per run and a column per choice, the best first."""
    first, *others = points
    line = (
        f"{first} is first on the choose splits {limit}: its heads lose {points_over_runs(points[first])} of {quality}"
        " against the best subsets (mean over budgets and runs, 95 % interval over runs)"
    )
    if others:
        more = points[others[0]] - points[first]
        line += f"; {others[0]} comes next, by {points_over_runs(more)} more"
        low, high = student_interval(more)
        line += ", which is within the noise" if low <= 0 <= high else ""
    return line


def head_map(tables: Tables) -> Verdict | None:
    """The heads that are prunable one at a time; None without a score by ablation."""
    scores = tables["heads"]
    if REFERENCE not in set(scores["scorer"]):
        return None
    heads = scored(scores, REFERENCE)
    ablation = scores[scores["scorer"] == REFERENCE]
    tolerance = float(tables["winner"]["prunable_tolerance"].iloc[0])
    heads["stays"] = ~prunable(ablation[MOMENTS].to_numpy().T, tolerance)
    return prunable_alone(heads, REFERENCE, tolerance, tables)


def headline(tables: Tables) -> list[Number]:
    """Return the regret of the best choice at few passes, and how many heads are prunable alone."""
    few = tables["winner"].iloc[-1]
    numbers = [Number("points of regret", 100 * float(few["regret_quality"]))]
    if "prunable_heads" in few:
        total = float(few["heads_total"])
        numbers.append(Number("heads prunable alone", float(few["prunable_heads"]), total, "", 0.0, total))
    return numbers


def _best(row: pd.Series, quality: str) -> Iterator[str]:
    """Who is first, what ties with it, what is surely worse, and the cheapest of those that tie."""
    limit, first = limit_words(row["most_passes"]), row["first"]
    tied, worse, better = (_names(row[column]) for column in ("tied", "worse", "better"))
    if tied:
        yield (
            f"No winner {limit}: {first} is first on the choose split, but on the report split these differ from it by"
            f" less than the noise in {quality}: {tied}."
        )
    else:
        yield f"{first} does best on the choose split {limit}."
    best = "best subset" if row["oracle"] == "exact" else "best subset found"
    regret, low, high = (number(100 * row[f"regret_quality{end}"], 1) for end in ENDS)
    count = round(passes(row))
    it = f"None of these is cheaper than {row['choice']}, which costs" if tied else "It costs"
    yield (
        f"{it} {count} {'pass' if count == 1 else 'passes'} (a backward pass counts two). On the report split its"
        f" heads lose {regret} points of {quality} (95 % interval {low} to {high}) against the {best}, on average over"
        " the budgets."
    )
    if worse:
        yield f"Surely worse than {first}: {worse}."
    if better:
        yield f"Surely better on the report split than {first}: {better}."


def _names(cell: object) -> str:
    """Return the first of the names that a cell lists, and how many more there are."""
    names = cell.split(", ") if isinstance(cell, str) and cell else []
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} others" if more > 0 else "")


def passes(methods: Any) -> Any:
    """Return the cost of a row or of a whole table in forward passes over the score split; a backward pass counts
    two."""
    return methods["forward_passes"] + 2 * methods["backward_passes"]


def limit_words(most_passes: float) -> str:
    """Return the words for choices that cost at most so much."""
    return "at any cost" if math.isinf(most_passes) else f"with at most {most_passes:g} forward passes"
