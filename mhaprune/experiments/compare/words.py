"""What `experiment=compare` found, in sentences and as a map of the heads."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd

from mhaprune.reporting.sentences import points_over_runs
from mhaprune.reporting.verdict import Verdict, prunable_alone, scored
from mhaprune.statistics import prunable
from mhaprune.tables import CHOOSE_QUALITY, MOMENTS, REFERENCE, UNINFORMED, Tables


def say(tables: Tables) -> Iterator[str]:
    """Which score chooses best and by how much, which heads are prunable, and what one split would have changed."""
    yield _headline(tables["winner"])
    yield from _details(tables["winner"])


def over_runs(tables: Tables) -> Iterator[str]:
    """Over the runs of each task: the scorer that does best on the choose splits, with intervals over runs."""
    methods = tables["methods"]
    for task, runs in methods[methods["family"] != UNINFORMED].groupby("task", sort=False):
        chosen, regrets = (
            runs.pivot_table(index="label", columns="scorer", values=column, sort=False).dropna(axis="columns")
            for column in (CHOOSE_QUALITY, "regret_quality")
        )
        if len(chosen) < 2 or chosen.shape[1] == 0:
            continue
        order = chosen.mean().sort_values(ascending=False, kind="stable").index
        best = regrets[order[0]]
        line = (
            f"Over {len(chosen)} runs on {task} {order[0]} chooses best: its heads cost"
            f" {points_over_runs(100 * best)} of exact match against the best subsets"
            " (mean over budgets and runs, 95 % interval over runs)"
        )
        if len(order) > 1:
            line += f"; {order[1]} comes next, by {points_over_runs(100 * (regrets[order[1]] - best))} more"
        yield f"{line}."


def head_map(tables: Tables) -> Verdict | None:
    """The heads that are prunable one at a time; None without a score by ablation."""
    scores = tables["heads"]
    if REFERENCE not in set(scores["scorer"]):
        return None
    heads = scored(scores, REFERENCE)
    ablation = scores[scores["scorer"] == REFERENCE]
    tolerance = float(tables["winner"]["prunable_tolerance"].iloc[0])
    heads["stays"] = ~prunable(ablation[MOMENTS].to_numpy().T, tolerance)
    return prunable_alone(heads, REFERENCE, tolerance)


def _headline(winner: pd.DataFrame) -> str:
    """The scorer that chooses best, and whether it is ahead of the next."""
    row = winner.iloc[0]
    best = "best subset" if row["oracle"] == "exact" else "best subset found"
    line = (
        f"{row['winner']} chooses best on the choose split: on the report split its heads cost"
        f" {100 * row['regret_quality']:.1f} points of exact match against the {best}, on average over the"
        f" budgets (95 % interval {100 * row['regret_quality_low']:.1f} to"
        f" {100 * row['regret_quality_high']:.1f})"
    )
    if not isinstance(row["runner_up"], str):
        return f"{line}."
    points = f"{100 * abs(row['margin']):.1f} points"
    interval = f"({100 * row['margin_low']:.1f} to {100 * row['margin_high']:.1f}, sign-flip p = {row['margin_p']:.2g})"
    if row["verdict"] == "behind":
        return (
            f"{line}; {row['runner_up']}, second on the choose split, does better by {points} on the report split"
            f" {interval}, which is beyond the noise."
        )
    beyond = "beyond" if row["verdict"] == "ahead" else "within"
    side = "behind" if row["margin"] >= 0 else "ahead on the report split"
    return f"{line}; {row['runner_up']} comes next, {points} {side} {interval}, which is {beyond} the noise."


def _details(winner: pd.DataFrame) -> Iterator[str]:
    row = winner.iloc[0]
    if "prunable_heads" in row and not math.isnan(row["prunable_heads"]):
        yield (
            f"{int(row['prunable_heads'])} of {int(row['heads_total'])} heads are prunable one at a time: at 95 %"
            f" confidence for all of these together, the ablation of each costs less than"
            f" {row['prunable_tolerance']:g} nats."
        )
    if not math.isnan(row["leak"]):
        yield (
            "Leak: with scoring, choosing and reporting on one split, the best choices would have been reported"
            f" {100 * abs(row['leak']):.1f} points of exact match {'higher' if row['leak'] >= 0 else 'lower'}"
            f" ({100 * row['leak_low']:+.1f} to {100 * row['leak_high']:+.1f})."
        )
