"""Which heads go, by which scorer and schedule, at which budget. A plan removes nothing yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.progress import doing, track
from mhaprune.pruning.search import Search
from mhaprune.schedules.base import Schedule
from mhaprune.schedules.budgets import Budget
from mhaprune.scorers.base import Budgeted, Scorer
from mhaprune.scorers.scoring import Scoring, settings_text
from mhaprune.settings.options import option_name
from mhaprune.tables import join_names

SEARCH = "search"
"""The family of schedules that use no scores."""


class Plan(NamedTuple):
    """A mask, and the scorer, draw, schedule and budget that it comes from."""

    scorer: str
    draw: int
    schedule: str
    mask: HeadMask
    budget: str = ""


class Choice(NamedTuple):
    """All plans of one scorer and schedule, or of a schedule that uses no scores, and what they took."""

    scorer: str
    """The name of the scorer, or that of a schedule that uses none."""
    schedule: str
    family: str
    settings: str
    plans: list[Plan]
    cost: dict[str, float]
    """`forward_passes` and `backward_passes` over the score split and `seconds`, for all budgets together and one
    draw."""


def choices(
    scoring: Scoring,
    scorers: Mapping[str, Scorer],
    schedule: Schedule,
    budgets: Sequence[Budget],
    name: str | None = None,
    draws: int | None = None,
    whole: HeadGrid | None = None,
) -> Iterator[Choice]:
    """One per scorer, each with a plan per draw and budget. A schedule that uses no scores makes one, in its own name.

    `name` is that of the schedule, by default its option's. `draws` limits the draws of a random scorer, by default to
    all. `whole` is the grid before any heads were removed, by default the subject's.
    """
    subject, how = scoring.subject, name or option_name(schedule)

    def planned(name: str, draw: int, search: Search, budgets: Sequence[Budget]) -> list[Plan]:
        masks = search(schedule, budgets)
        return [Plan(name, draw, how, mask, budget.name) for mask, budget in zip(masks, budgets, strict=True)]

    if schedule.scoring == "none":
        search = Search(scoring, whole=whole)
        with doing(how):
            plans = planned(how, 0, search, budgets)
        yield Choice(how, how, SEARCH, settings_text(schedule), plans, search.cost)
        return
    for name, scorer in track(scorers.items(), how, name=lambda each: each[0]):
        kept = [budget.heads_kept(subject.grid) for budget in budgets]
        by_budget = scorers_for(scorer, kept, len(subject.grid), schedule.scoring == "repeated")
        plans, costs = [], []
        for told in dict.fromkeys(by_budget):
            served = [budget for budget, other in zip(budgets, by_budget, strict=True) if other == told]
            for draw in range(len(scoring(name, told).scores.values))[:draws]:
                search = Search(scoring, name, told, draw, whole)
                plans += planned(name, draw, search, served)
                costs += [search.cost] if draw == 0 else []
        costs.append(scoring.cost(by_budget))
        cost = {unit: sum(one[unit] for one in costs) for unit in costs[-1]}
        yield Choice(name, how, scorer.family, settings_text(scorer), plans, cost)


def plans_of(made: Iterable[Choice]) -> list[Plan]:
    """The plans of several choices, for experiments that do not need to know what they took."""
    return [plan for choice in made for plan in choice.plans]


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


def plan_words(plan: Plan) -> str:
    """What the progress line says of a plan."""
    return f"{plan.scorer}, {len(plan.mask.removed)} of {len(plan.mask.grid)} heads removed"


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
