"""Plans: the heads to remove, by scorer, schedule and number. No head is removed here."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.measure.outcomes import gate_gradients, measure, measure_removed
from mhaprune.progress import doing, track
from mhaprune.recoveries.refitting import RefitTargets, refit, show
from mhaprune.schedules.base import Evidence, Schedule, Stepwise
from mhaprune.scorers.base import Budgeted, Scorer
from mhaprune.scorers.scoring import Scoring, naming, settings_text
from mhaprune.scorers.surgeon import Surgeon
from mhaprune.settings.options import option_name
from mhaprune.subject import Subject
from mhaprune.tables import join_names

log = logging.getLogger(__name__)

SEARCH = "search"
"""The family name of schedules that use no scores."""


class Plan(NamedTuple):
    """A mask, and the scorer, draw and schedule that chose it."""

    scorer: str
    draw: int
    schedule: str
    mask: HeadMask


class Choice(NamedTuple):
    """All plans of one scorer and one schedule, and their cost. If the schedule uses no scores, there is no scorer, and
    the name of the schedule stands in its place."""

    scorer: str
    """The name of the scorer, or of the schedule if it uses no scores."""
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
    budgets: Sequence[float],
    name: str | None = None,
    draws: int | None = None,
    whole: HeadGrid | None = None,
    cost: Tensor | None = None,
) -> Iterator[Choice]:
    """Yield a choice for each scorer, with a plan for each draw and budget. For a schedule that uses no scores, yield
    one choice under the name of the schedule.

    A budget is a number of heads to remove, or, given the `cost` of each head (N,), their cost. `name` is the name of
    the schedule, by default the name of its option. `draws` is the largest number of draws of a random scorer, by
    default all. `whole` is the grid before any heads were removed, by default the grid of the subject.
    """
    subject, how = scoring.subject, name or option_name(schedule)

    def planned(name: str, draw: int, search: Search, budgets: Sequence[float]) -> list[Plan]:
        return [Plan(name, draw, how, mask) for mask in search(schedule, budgets)]

    if schedule.scoring == "none":
        search = Search(scoring, whole=whole, removal_cost=cost)
        with doing(how):
            plans = planned(how, 0, search, budgets)
        yield Choice(how, how, SEARCH, settings_text(schedule), plans, search.cost)
        return
    for name, scorer in track(scorers.items(), how, name=lambda each: each[0]):
        heads = len(subject.grid)
        share = 1.0 if cost is None else heads / float(cost.sum())
        kept = [heads - round(share * budget) for budget in budgets]
        by_budget = scorers_for(scorer, kept, heads, schedule.scoring == "repeated")
        plans, costs = [], []
        for told in dict.fromkeys(by_budget):
            served = [budget for budget, other in zip(budgets, by_budget, strict=True) if other == told]
            for draw in range(len(scoring(name, told).scores.values))[:draws]:
                search = Search(scoring, name, told, draw, whole, cost)
                plans += planned(name, draw, search, served)
                costs += [search.cost] if draw == 0 else []
        costs.append(scoring.cost(by_budget))
        spent = {unit: sum(one[unit] for one in costs) for unit in costs[-1]}
        yield Choice(name, how, scorer.family, settings_text(scorer), plans, spent)


def plans_of(made: Iterable[Choice]) -> list[Plan]:
    """Return the plans of several choices, without their costs."""
    return [plan for choice in made for plan in choice.plans]


def scorers_for(scorer: Scorer, kept: Sequence[int], num_heads: int, again: bool = False) -> list[Scorer]:
    """Return one scorer for each number of heads to keep.

    A `Budgeted` scorer is set to this number. To remove no head or all heads, no score is needed, so the scorer does
    not matter there. But a schedule that scores smaller models `again` also needs scores on the way to no heads. There
    it gets a scorer that keeps one head.
    """
    if not isinstance(scorer, Budgeted):
        return [scorer] * len(kept)
    told = {count: scorer.keeping(count) for count in kept if 0 < count < num_heads}
    if again and 0 in kept:
        told[0] = scorer.keeping(1)
    fallback = next(iter(told.values()), scorer)
    return [told.get(count, fallback) for count in kept]


def plan_words(plan: Plan) -> str:
    """Return a plan in words, for the progress line."""
    return f"{plan.scorer}, {len(plan.mask.removed)} of {len(plan.mask.grid)} removed"


def plan_columns(plan: Plan) -> dict[str, Any]:
    """Return the columns of a plan: its scorer and schedule, and the removed heads."""
    total, removed = len(plan.mask.grid), len(plan.mask.removed)
    return {
        "scorer": plan.scorer,
        "draw": plan.draw,
        "schedule": plan.schedule,
        "heads_total": total,
        "heads_kept": total - removed,
        "heads_removed": removed,
        "fraction_removed": removed / total if total else 0.0,
        "removed": removed_names(plan.mask),
    }


def removed_names(mask: HeadMask) -> str:
    """Return the names of the removed heads, in the order of the grid; empty for none."""
    return join_names(head for head in mask.grid if head in mask.removed)


COSTS = ("forward_passes", "backward_passes", "seconds")
"""The columns of the cost of a choice of heads: passes over the score split, and seconds."""


@dataclass
class Search:
    """One call of a schedule, and its cost. The cost of scoring the dense model is not included.

    With this class, scores and searches can be compared at equal cost. Every mask that a schedule measures counts as
    one forward pass over the score split, although shared prefixes make it faster.
    """

    scoring: Scoring
    name: str = ""
    scorer: Scorer | None = None
    """The scorer whose scores the schedule uses; None for a schedule that uses no scores."""
    draw: int = 0
    whole: HeadGrid | None = None
    removal_cost: Tensor | None = None
    """See `Evidence.cost`."""
    cost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COSTS, 0.0))
    """The cost of the call: passes over the score split, and seconds."""
    refitting: list[Refits] = field(default_factory=list)

    def __call__(self, schedule: Schedule, budgets: Sequence[float]) -> list[HeadMask]:
        if self.scorer is not None:
            self.scoring(self.name, self.scorer)  # now, so that its time does not count as the search's
        start = time.perf_counter()
        known = self.scoring.subject, self._score, self._loss, self.whole, self._gradients, self._refits
        evidence = Evidence(*known, self.removal_cost)
        masks = schedule(evidence, budgets)
        self.cost["seconds"] += time.perf_counter() - start
        if isinstance(schedule, Stepwise) and schedule.scoring == "once":
            for mask in masks:
                self._say_ties(schedule, evidence, mask)
        for refits in self.refitting:
            self.cost["forward_passes"] += refits.passes * len(refits.fitted) / len(self.scoring.examples)
        self.refitting.clear()
        return masks

    def _say_ties(self, schedule: Stepwise, evidence: Evidence, mask: HeadMask) -> None:
        """Say how many heads were removed only because they come first: others with the same score stay."""
        scores, cost = self._score(self.scoring.subject).tolist(), evidence.costs()
        value = {head: score / cost[head] for head, score in zip(mask.grid, scores, strict=True)}
        apart = schedule.scope == "per_block"
        left = {(head.block if apart else None, value[head]) for head in schedule.removable(evidence, mask)}
        drawn = sum((head.block if apart else None, value[head]) in left for head in mask.removed)
        if drawn:
            log.warning(
                "scorer=%s: %d of the %d removed have the same score as others that stay, so their order decided",
                *(self.name, drawn, len(mask.removed)),
            )

    def _score(self, left: Subject) -> Tensor:
        assert self.scorer is not None, "the schedule reads a score, its `scoring` says none"
        if left is self.scoring.subject:
            return self.scoring(self.name, self.scorer).scores.values[self.draw]
        with naming(self.name):
            scores = self.scorer(left, self.scoring.examples, self.scoring.seed)
        self.cost["forward_passes"] += scores.forward_passes
        self.cost["backward_passes"] += scores.backward_passes
        return scores.values[self.draw]

    def _loss(self, masks: Sequence[HeadMask]) -> Tensor:
        self.cost["forward_passes"] += len(masks)
        return measure_removed(self.scoring.subject, self.scoring.examples, masks).loss.double().mean(dim=1)

    def _gradients(self) -> Tensor:
        self.cost["forward_passes"] += 1
        self.cost["backward_passes"] += 1
        return gate_gradients(self.scoring.subject, self.scoring.examples)

    def _refits(self, examples: int) -> Refits:
        if len(self.scoring.examples) < 2:
            raise ValueError("score: one example; a schedule that refits needs 2 or more, half of them for the losses")
        self.refitting.append(Refits(self.scoring.subject, self.scoring.examples.evenly(examples)))
        return self.refitting[-1]


class Refits:
    """A maker of pruned copies of a subject. One half of the examples serves to refit a copy to the subject, the other
    half to measure it. The passes are counted."""

    def __init__(self, subject: Subject, examples: Data) -> None:
        self.subject, self.fitted, self.judged = subject, examples[::2], examples[1::2]
        self.passes = 0.0
        """Number of forward passes, each over one half of the examples."""

    def without(self, mask: HeadMask) -> Subject:
        """Return the subject without these heads, refitted."""
        shown = self._shown
        self.passes += 1
        return refit(self.subject.without(mask), shown, feed_forward=False)

    def loss(self, left: Subject) -> float:
        """Return the mean loss of a model in nats."""
        self.passes += 1
        with torch.no_grad():
            return float(measure(left, self.judged).loss.double().mean())

    def errors(self, left: Subject) -> Tensor:
        """Return the error that a refit leaves without each head that `left` still has."""
        scores = Surgeon(step=1.0)(left, self.fitted, 0)
        self.passes += scores.forward_passes
        return scores.values[0]

    @cached_property
    def _shown(self) -> RefitTargets:
        self.passes += 1
        return show(self.subject, self.fitted)
