"""The heads that stay, chosen by a score or a search, at one size or at several."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mhaprune.api.budget import Budget
from mhaprune.api.parsing import GivenScores, named_scorers, scores_of
from mhaprune.api.scored_heads import ScoredHeads
from mhaprune.api.sizes import Size
from mhaprune.api.worst_kind import WorstKind
from mhaprune.heads import BlockId, HeadMask
from mhaprune.hooks.blocks import Unsupported
from mhaprune.pruning.plans import choices, plans_of
from mhaprune.schedules.base import ROUNDING, Schedule, Stepwise, least_in
from mhaprune.schedules.iterative import Iterative
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.base import Budgeted, Scorer
from mhaprune.settings.options import option

By = Any
"""A scorer, by name or as an object, or scores (see `api.parsing.scores_of`); or a schedule that uses no scores. None
means `ablation`, and with neurons among the units `surgeon`, whose cost does not grow with their number."""


def choose(heads: ScoredHeads, budgets: Sequence[Budget], by: By, schedule: str | Schedule | None) -> list[HeadMask]:
    """Return a mask for each budget, all chosen in one call of the schedule. They differ only in `keep`."""
    if not budgets:
        return []
    first, streams = budgets[0], heads.subject.window is not None
    if streams and (counts := first.in_time or f"of={first.of}") != "of=units":
        raise ValueError(f"{counts}: heads that stream hold as many weights and read a text no faster, leave it out")
    if first.unit is not None and heads.subject.single is not None:
        raise ValueError(f"unit={first.unit}: these heads are sets of heads already, leave it out")
    if first.unit is not None and (grouped := heads.units(first.unit)) is not heads:
        found = choose(grouped, [replace(budget, unit=None) for budget in budgets], by, schedule)
        return [grouped.subject.mask_of_heads(mask) for mask in found]
    sizes = [budget.size for budget in budgets]
    scorers, how = _way(heads, first, by, schedule)
    if first.even is not False:
        if not isinstance(how, Stepwise):
            raise ValueError(f"by={by}: with even= it must be a score, or a search that removes head by head")
        how = sizes[0].evened(heads, how) or how
    if how.removes and streams:
        raise ValueError("schedule: scores smaller models, but heads that stream are scored once")
    if how.removes or sizes[0].by_removal:
        heads.check_removable()
    choice = Choice(heads, scorers, sparing(heads, how, sizes[0].useless(heads)), sizes)
    return sizes[0].masks(sizes, heads, choice)


@dataclass(frozen=True)
class Choice:
    """The choice of one call: calling it returns the masks of several sizes."""

    heads: ScoredHeads
    scorers: Mapping[str, Scorer]
    schedule: Schedule
    sizes: Sequence[Size]
    """The sizes that are asked for."""

    def __call__(self, kept: Sequence[float], cost: Tensor | None) -> list[HeadMask]:
        """Return a mask for each number of units that stay; with `cost`, (N,), for each cost of all that stay. Raises
        ValueError if more must stay, and if a score is the same for all units."""
        total = len(self.heads.grid) if cost is None else float(cost.sum())
        for size, count in zip(self.sizes, kept, strict=False):  # some sizes ask for one mask after the other
            self.check_reachable(size, count, cost)
        if any(ROUNDING < count < total - ROUNDING for count in kept):
            check_different(self.heads, self.scorers)
        removed = [total - count for count in kept]
        made = choices(self.heads.scoring, self.scorers, self.schedule, removed, draws=1, cost=cost)
        return [plan.mask for plan in plans_of(made)]

    def check_reachable(self, size: Size, count: float, cost: Tensor | None) -> None:
        heads = self.heads
        stay = [head in mask.kept for mask in [self.schedule.smallest(heads.grid)] for head in heads.grid]
        least = float(sum(stay)) if cost is None else float(cost[torch.tensor(stay)].sum())
        if count >= least - ROUNDING:
            return
        asked = f"{count:.6g} {heads.subject.counted if cost is None else size.what}"
        why = next((f", {block} for example: {reason}" for block, reason in heads.proven.stuck.items()), "")
        raise ValueError(f"{size.words}: keeps {asked}, but {least:.6g} must stay{why}")


def check_different(heads: ScoredHeads, scorers: Mapping[str, Scorer]) -> None:
    """Raise ValueError if a measured score is the same for all units: then it chooses nothing."""
    for name, scorer in scorers.items():
        values = heads.scoring(name, scorer).scores.values
        if len(heads.grid) > 1 and not isinstance(scorer, GivenScores) and bool((values == values[:, :1]).all()):
            why, window = "", heads.subject.window
            if window is not None and int(heads.splits.score.lengths().max()) <= sum(window):
                why = f": no text of *score* is longer than the window, {sum(window)} tokens"
            units = heads.subject.counted
            raise ValueError(
                f"by={name}: is {float(values[0, 0]):g} for all {len(heads.grid)} {units}, so it cannot choose{why}"
            )


def usual_scores(heads: ScoredHeads) -> tuple[str, str, str]:
    """Return the scores that are used if none is named: the first chooses, the others are to compare with."""
    many = heads.subject.single is None and any(block.kind == "neuron" for block in heads.subject.blocks)
    return "surgeon" if many else "ablation", "gate_output", "random"


def _way(
    heads: ScoredHeads, budget: Budget, by: By, schedule: str | Schedule | None
) -> tuple[dict[str, Scorer], Schedule]:
    """Return the scorer by its name, none for a schedule that uses no scores, and the schedule."""
    by = usual_scores(heads)[0] if by is None else by
    chosen: Any = option(by, {"scorer": Scorer, "schedule": Schedule}) if isinstance(by, str) else by
    given: Any = option(schedule, {"schedule": Schedule}) if isinstance(schedule, str) else schedule
    if isinstance(chosen, Schedule):
        if chosen.scoring != "none":
            raise ValueError(f"by={by}: uses scores; name a score by= and this as schedule=")
        if given is not None or budget.rescore_every is not None:
            more = "schedule" if given is not None else "rescore_every"
            raise ValueError(f"by={by}: is a schedule that uses no scores, leave {more}= out")
        if budget.over != "all":
            raise ValueError(f"by={by}: is a schedule that uses no scores, leave over= out")
        return {}, chosen
    if given is not None and budget.rescore_every is not None:
        raise ValueError("rescore_every: is a setting of the schedule iterative, leave it or schedule= out")
    if given is None:
        given = OneShot() if budget.rescore_every is None else Iterative(every=budget.rescore_every)
    if given.scoring == "none":
        if budget.over != "all":
            raise ValueError(f"schedule={schedule}: uses no scores, leave over= out")
        return {}, given
    scorer = chosen if isinstance(chosen, Scorer) else scores_of(by, heads.grid)
    named = named_scorers(heads.subject, [by if isinstance(by, str) else scorer])
    if budget.over == "all":
        return named, given
    if len(heads.splits.score.by_kind()) < 2:
        raise ValueError("over=worst: needs two kinds or more, wrap(..., score={name: batches, ...})")
    if isinstance(scorer, Budgeted) or not scorer.reads_examples:
        what = by if isinstance(by, str) else "by= of your own"
        raise ValueError(f"over=worst: {what} has no score on one kind of examples, leave it out")
    return {f"{name} on the worst kind": WorstKind(each) for name, each in named.items()}, given


def sparing(heads: ScoredHeads, schedule: Schedule, useless: Collection[BlockId] = ()) -> Schedule:
    """Return the schedule so that it keeps the heads that cannot be removed, and those of the blocks `useless`, whose
    removal brings nothing of what is asked for, and two of each block that `meets` them. Raises `Unsupported` for a
    schedule that cannot."""
    stuck = {**dict.fromkeys(useless, "it keeps nothing in the cache"), **heads.proven.stuck}
    stay, steps = heads.must_stay(), isinstance(schedule, Stepwise) and schedule.scope != "per_block"
    if heads.proven.why_not or not (stuck or (steps and any(stay.values()))):
        return schedule
    sizes = dict(zip(heads.grid.blocks, heads.grid.sizes, strict=True))
    own = schedule.keep_at_least if isinstance(schedule, Stepwise) else 0
    uneven = [block for block in stuck if isinstance(own, Mapping) and own[block] < sizes[block]]
    if not isinstance(schedule, Stepwise) or not steps or uneven:
        block, reason = next(iter(stuck.items()))
        what = "stay" if block in useless else "can be gated, not removed"
        raise Unsupported(f"heads of {block} {what}: {reason}; a score, or a search head by head, spares them")
    least = {block: size if block in stuck else max(least_in(block, own), stay[block]) for block, size in sizes.items()}
    return replace(schedule, keep_at_least=least)
