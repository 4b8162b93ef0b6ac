"""Which heads go, by which scorer and schedule, at which budget: plans that nothing has carried out yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.measure import measure_removed
from mhaprune.schedules.base import Judge, Schedule
from mhaprune.schedules.budgets import Budget
from mhaprune.scorers.base import Budgeted, Scorer
from mhaprune.scorers.scoring import Scoring, naming
from mhaprune.store import option_name
from mhaprune.subject import Subject
from mhaprune.tables import join_names


class Plan(NamedTuple):
    """One mask and how it came about."""

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
    """A plan per scorer, draw and budget. Where scorers have no say there is one per budget, in the schedule's name.

    `name` is that of the schedule, by default its option's; of a scorer that draws several times the first `draws` are
    taken, by default all; `whole` are the heads before any were removed, by default the subject's.
    """
    subject, how, again = scoring.subject, name or option_name(schedule), schedule.scoring == "repeated"

    def loss(masks: Sequence[HeadMask]) -> Tensor:
        return measure_removed(subject, scoring.examples, masks).loss.double().mean(dim=1)

    def judge(name: str, scorer: Scorer, draw: int) -> Judge:
        def score(left: Subject) -> Tensor:
            if left is subject:
                return scoring(name, scorer).scores.values[draw]
            with naming(name):
                return scorer(left, scoring.examples, scoring.seed).values[draw]

        return Judge(subject, score, loss, whole)

    def nobody(left: Subject) -> Tensor:
        raise AssertionError(f"schedule={how} promised to ask no scorer")

    if schedule.scoring == "none":
        masks = schedule(Judge(subject, nobody, loss, whole), budgets)
        yield from (Plan(how, 0, how, mask, budget.name) for budget, mask in zip(budgets, masks, strict=True))
        return
    for name, scorer in scorers.items():
        kept = [budget.heads_kept(subject.grid) for budget in budgets]
        asked = whom_to_ask(scorer, kept, len(subject.grid), again)
        for one in dict.fromkeys(asked):
            mine = [budget for budget, other in zip(budgets, asked, strict=True) if other == one]
            for draw in range(len(scoring(name, one).scores.values))[:draws]:
                masks = schedule(judge(name, one, draw), mine)
                yield from (Plan(name, draw, how, mask, budget.name) for budget, mask in zip(mine, masks, strict=True))


def whom_to_ask(scorer: Scorer, kept: Sequence[int], num_heads: int, again: bool = False) -> list[Scorer]:
    """The scorer that says which heads go, for every number that is to stay: a `Budgeted` one is told that number.

    Where none or all go there is no choice, and whoever is asked anyway will do; save where it is asked `again`, down
    to the last head.
    """
    if not isinstance(scorer, Budgeted):
        return [scorer] * len(kept)
    told = {count: scorer.keeping(count) for count in kept if 0 < count < num_heads}
    if again and 0 in kept:
        told[0] = scorer.keeping(1)
    anybody = next(iter(told.values()), scorer)
    return [told.get(count, anybody) for count in kept]


def plan_columns(plan: Plan) -> dict[str, Any]:
    """What says which heads went and why."""
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
