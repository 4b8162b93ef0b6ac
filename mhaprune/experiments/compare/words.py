"""What `experiment=compare` found, in sentences and as a map of the heads."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd

from mhaprune.experiments.compare.limits import limit_words, passes
from mhaprune.reporting.headline import Number
from mhaprune.reporting.sentences import points_over_runs
from mhaprune.reporting.verdict import Verdict, prunable_alone, scored
from mhaprune.statistics.intervals import prunable
from mhaprune.tables import CHOOSE_QUALITY, ENDS, MOMENTS, REFERENCE, UNINFORMED, Tables, in_unit, quality_name


def say(tables: Tables) -> Iterator[str]:
    """What chooses best at few passes and at any cost, by how much, which heads are prunable, and what one split would
    have changed."""
    winners = tables["winner"]
    yield _headline(winners, quality_name(tables))
    for _, row in winners.drop_duplicates(["winner", "runner_up"]).iterrows():
        if isinstance(row["runner_up"], str):
            yield _margin(row)
    yield from _details(winners, quality_name(tables), in_unit(tables))


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
            if len(chosen) >= 2 and chosen.shape[1]:
                order = chosen.mean().sort_values(ascending=False, kind="stable").index
                said = _best_over_runs(100 * regrets[order], limit_words(limit), quality_name(tables))
                yield f"Over {len(chosen)} runs on {task} {said}."


def _best_over_runs(points: pd.DataFrame, limit: str, quality: str) -> str:
    """`points` holds a row per run and a column per choice, the best first."""
    first, *others = points
    line = (
        f"{first} chooses best {limit}: its heads cost {points_over_runs(points[first])} of {quality} against the"
        " best subsets (mean over budgets and runs, 95 % interval over runs)"
    )
    if others:
        line += f"; {others[0]} comes next, by {points_over_runs(points[others[0]] - points[first])} more"
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
    """What the best choice at few passes loses against the best subset, and how many heads are prunable alone."""
    few = tables["winner"].iloc[-1]
    numbers = [Number("points of regret", 100 * float(few["regret_quality"]))]
    if "prunable_heads" in few:
        total = float(few["heads_total"])
        numbers.append(Number("heads prunable alone", float(few["prunable_heads"]), total, "", 0.0, total))
    return numbers


def _headline(winners: pd.DataFrame, quality: str) -> str:
    """What chooses best at few passes and at any cost, and what that is worth."""
    any_cost, few = winners.iloc[0], winners.iloc[-1]
    best = "best subset" if few["oracle"] == "exact" else "best subset found"
    line = (
        f"{few['winner']} chooses best on the choose split {limit_words(few['most_passes'])}: on the report split its"
        f" heads cost {_regret(few, f'points of {quality}')} against the {best}, on average over the budgets,"
        f" {_cost(few)} (a backward pass counts two)"
    )
    if len(winners) == 1:
        return f"{line}."
    if any_cost["winner"] == few["winner"]:
        return f"{line}; it chooses best at any cost too."
    return f"{line}; at any cost {any_cost['winner']} does, {_regret(any_cost, 'points')}, {_cost(any_cost)}."


def _regret(row: pd.Series, unit: str) -> str:
    regret, low, high = (100 * row[f"regret_quality{end}"] for end in ENDS)
    return f"{regret:z.1f} {unit} (95 % interval {low:z.1f} to {high:z.1f})"


def _cost(row: pd.Series) -> str:
    count = round(passes(row))
    return f"at a cost of {count} {'pass' if count == 1 else 'passes'} and {row['seconds']:.1f} s"


def _margin(row: pd.Series) -> str:
    """How far the first is ahead of the second, and whether that is noise."""
    first, second, limit = row["winner"], row["runner_up"], limit_words(row["most_passes"])
    points = f"{100 * abs(row['margin']):.1f} points"
    interval = (
        f"({100 * row['margin_low']:z.1f} to {100 * row['margin_high']:z.1f}, sign-flip p = {row['margin_p']:.2g})"
    )
    line = f"{second} comes next after {first} {limit}"
    if row["verdict"] == "behind":
        return f"{line}, and does better by {points} on the report split {interval}, which is beyond the noise."
    beyond = "beyond" if row["verdict"] == "ahead" else "within"
    side = "behind" if row["margin"] >= 0 else "ahead on the report split"
    return f"{line}, {points} {side} {interval}, which is {beyond} the noise."


def _details(winner: pd.DataFrame, quality: str, unit: str) -> Iterator[str]:
    row = winner.iloc[0]
    if "prunable_heads" in row and not math.isnan(row["prunable_heads"]):
        yield (
            f"{int(row['prunable_heads'])} of {int(row['heads_total'])} heads are prunable one at a time: at 95 %"
            f" confidence for all of these together, the ablation of each costs less than"
            f" {row['prunable_tolerance']:g}{unit}."
        )
    if not math.isnan(row["leak"]):
        yield (
            "Leak: with scoring, choosing and reporting on one split, the best choices by a score would have been"
            f" reported {100 * abs(row['leak']):.1f} points of {quality} {'higher' if row['leak'] >= 0 else 'lower'}"
            f" ({100 * row['leak_low']:+.1f} to {100 * row['leak_high']:+.1f})."
        )
