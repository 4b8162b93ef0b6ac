"""Which heads go, by which scorer and schedule, at which budget. A plan removes nothing yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.measure import measure_removed
from mhaprune.schedules.base import Evidence, Schedule
from mhaprune.schedules.budgets import Budget
from mhaprune.scorers.base import Budgeted, Scorer
from mhaprune.scorers.scoring import Scoring, naming
from mhaprune.store import option_name
from mhaprune.subject import Subject
from mhaprune.tables import join_names


class Plan(NamedTuple):
    """A mask, and the scorer, draw, schedule and budget that it comes from."""

    scorer: str
    draw: int
    schedule: str
    mask: HeadMask
    budget: str = ""


def make_plans(
    scoring: Scoring,
    scorers: Mapping[str, Scorer],
    schedule: Schedule,
    budgets: Sequence[Budget],
    name: str | None = None,
    draws: int | None = None,
    whole: HeadGrid | None = None,
) -> Iterator[Plan]:
    """A plan per scorer, draw and budget. A schedule that uses no scores makes one plan per budget, in its own name.

    `name` is that of the schedule, by default its option's. `draws` limits the draws of a random scorer, by default to
    all. `whole` is the grid before any heads were removed, by default the subject's.
    """
    subject, how, again = scoring.subject, name or option_name(schedule), schedule.scoring == "repeated"

    def loss(masks: Sequence[HeadMask]) -> Tensor:
        return measure_removed(subject, scoring.examples, masks).loss.double().mean(dim=1)

    def evidence(name: str, scorer: Scorer, draw: int) -> Evidence:
        def score(left: Subject) -> Tensor:
            if left is subject:
                return scoring(name, scorer).scores.values[draw]
            with naming(name):
                return scorer(left, scoring.examples, scoring.seed).values[draw]

        return Evidence(subject, score, loss, whole)

    def no_score(left: Subject) -> Tensor:
        raise AssertionError(f"schedule={how} uses a score, its `scoring` says none")

    if schedule.scoring == "none":
        masks = schedule(Evidence(subject, no_score, loss, whole), budgets)
        yield from (Plan(how, 0, how, mask, budget.name) for budget, mask in zip(budgets, masks, strict=True))
        return
    for name, scorer in scorers.items():
        kept = [budget.heads_kept(subject.grid) for budget in budgets]
        by_budget = scorers_for(scorer, kept, len(subject.grid), again)
        for told in dict.fromkeys(by_budget):
            served = [budget for budget, other in zip(budgets, by_budget, strict=True) if other == told]
            for draw in range(len(scoring(name, told).scores.values))[:draws]:
                masks = schedule(evidence(name, told, draw), served)
                yield from (Plan(name, draw, how, mask, b.name) for b, mask in zip(served, masks, strict=True))


def scorers_for(scorer: Scorer, kept: Sequence[int], num_heads: int, again: bool = False) -> list[Scorer]:
    """The scorer for each number of heads to keep: a `Budgeted` scorer is told that number.

    Removing no head or every head needs no score, so any scorer serves. A schedule that scores `again` still needs one
    down to the last head.
    """
    if not isinstance(scorer, Budgeted):
        return [scorer] * len(kept)
    told = {count: scorer.keeping(count) for count in kept if 0 < count < num_heads}
    if again and 0 in kept:
        told[0] = scorer.keeping(1)
    fallback = next(iter(told.values()), scorer)
    return [told.get(count, fallback) for count in kept]


def plan_columns(plan: Plan) -> dict[str, Any]:
    """The columns that say which heads went and why."""
    total, removed = len(plan.mask.grid), len(plan.mask.removed)
    return {
        "scorer": plan.scorer,
        "draw": plan.draw,
        "schedule": plan.schedule,
        "budget": plan.budget,
        "heads_total": total,
        "heads_kept": total - removed,
        "heads_removed": removed,
        "fraction_removed": removed / total if total else 0.0,
        "removed": removed_names(plan.mask),
    }


def removed_names(mask: HeadMask) -> str:
    """The removed heads, in the order of the grid; empty for none."""
    return join_names(head for head in mask.grid if head in mask.removed)
