"""What `experiment=mistakes` found, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from mhaprune.reporting.headline import Number
from mhaprune.reporting.plots import correlation, number
from mhaprune.reporting.sentences import points_over_runs
from mhaprune.statistics.intervals import LEAST_RUNS, student_interval
from mhaprune.tables import Tables

RANDOM_GATES = "random_gate_init"
"""The mistake that is made before training, so it takes a second model."""
IN_SHORT = {
    "per_batch": "absolute values of the gradients of batches, not of examples",
    "whole_split": "the absolute value of one gradient for all examples",
    "not_zeroed": "gradients not set to zero between batches",
    "not_zeroed_per_example": "gradients not set to zero between examples",
    "normalised_by_layer": "right scores, divided by the norm of their block",
    RANDOM_GATES: "gates that start training at random values",
}
"""What each mistake is, in a clause."""


def say(tables: Tables) -> Iterator[str]:
    """Which mistake costs most, and what each of them costs."""
    mistakes = tables["mistakes"]
    worst = mistakes.loc[mistakes["cost_points"].idxmax()]
    over = f"mean over {worst['budgets']} budgets of this one model"
    if worst["cost_points"] > 0:
        points = f"{number(worst['cost_points'], 1)} points of exact match"
        yield f"{worst['mistake']} costs most: {points}, {over}. {worst['what']}"
        pruning = tables["mistake_pruning"]
        each = pruning[pruning["mistake"] == worst["mistake"]].sort_values("heads_removed")
        costs = ", ".join(number(cost, 1) for cost in each["cost_points"])
        gone = ", ".join(map(str, each["heads_removed"]))
        yield f"These are {costs} points with {gone} heads removed. Other seeds tell how much of that is chance."
    else:
        yield f"None of {len(mistakes)} mistakes costs exact match, {over}."
    costs = "; ".join(
        f"{row.mistake} ({IN_SHORT[row.mistake]}) {number(row.cost_points, 1)}, ρ = {correlation(row.spearman)}"
        for row in mistakes.itertuples()
    )
    yield (
        f"What every mistake costs in points, and Spearman's correlation ρ of its scores with the right ones: {costs}."
    )
    if RANDOM_GATES not in set(mistakes["mistake"]):
        yield f"{RANDOM_GATES} was not made: no second model was trained."


def headline(tables: Tables) -> list[Number]:
    """What the dearest mistake costs."""
    return [Number("points that the dearest mistake costs", float(tables["mistakes"]["cost_points"].max()))]


def over_runs(tables: Tables) -> Iterator[str]:
    """Over the runs of each task: the mistakes whose cost is beyond the noise."""
    mistakes = tables["mistakes"]
    for task, rows in mistakes.groupby("task", sort=False):
        models = rows["label"].nunique()
        if models < LEAST_RUNS:
            continue
        beyond = []
        for name, costs in rows.groupby("mistake", sort=False)["cost_points"]:
            low, high = student_interval(costs)
            if low > 0 or high < 0:
                beyond.append(name)
                yield (
                    f"Over {len(costs)} models on {task} {name} {'costs' if low > 0 else 'gains'}"
                    f" {points_over_runs(costs if low > 0 else -costs)} of exact match"
                    " (mean over budgets and models, 95 % interval over models)."
                )
        if not beyond:
            yield f"Over {models} models on {task} no mistake costs exact match beyond the noise."
