"""The number of heads that stay, and the sets in which they are removed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

import torch
from torch import Tensor

from mhaprune.api.parsing import GivenScores, least_of, named_scorers, scores_of
from mhaprune.api.promise import mask_in_time, unit_costs
from mhaprune.api.scored_heads import ScoredHeads
from mhaprune.heads import BlockId, HeadMask
from mhaprune.hooks.blocks import Unsupported
from mhaprune.pruning.plans import choices, plans_of
from mhaprune.schedules.base import ROUNDING, Schedule, Stepwise
from mhaprune.schedules.budgets import is_share
from mhaprune.schedules.iterative import Iterative
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.base import Scorer
from mhaprune.settings.options import option
from mhaprune.settings.ranges import Checked, Ge, Gt, check_type

By = Any
"""A scorer, by name or as an object, or scores (see `api.parsing.scores_of`); or a schedule that uses no scores."""
Number = float | int | None
"""A share or a number; None if it is not given."""
Unit = Literal["head", "group", "block", "call"]


@dataclass(frozen=True)
class Budget(Checked):
    """The number of heads that stay, and the sets in which they are removed.

    Methods of `Heads` take a `Budget`, or its fields by name: `heads.mask(0.5, even=True)`.

    >>> heads.mask(mhaprune.Budget(0.5, even=True)) == heads.mask(0.5, even=True)
    True
    """

    keep: Number = None
    """A share of the heads (0.5), or a number of them (72). None means 0.5, if no other field says how many stay."""
    of: Literal["units", "weights", "operations", "time"] = "units"
    """The things that `keep` counts: heads; or the weights that heads hold; or the products of numbers that they take
    for one token, at the mean length of the *score* split; or the milliseconds that they take on this machine, by an
    estimate. Then the heads with the lowest score per weight, product or millisecond are removed, until at most this
    share or number of them is left."""
    cache_bytes: Number = None
    """In place of `keep`: as many heads stay as fit into a key-value cache of this size, a share of the dense model's,
    or bytes for one example of `context` positions, as `Heads.cache_bytes` returns them."""
    context: Annotated[int, Ge(1)] = 1
    """With `cache_bytes`, the number of positions in the cache. It matters for heads that stream."""
    faster: Annotated[float, Gt(1)] | None = None
    """In place of `keep`: how many times as fast the smaller model is on this machine. Units go in the order of score
    per millisecond, and the model is timed until it is close; `Heads.promises` has what was measured at the end."""
    ms: Annotated[float, Gt(0)] | None = None
    """In place of `faster`: the milliseconds that a call of the smaller model takes on this machine."""
    batch_size: Annotated[int, Ge(1)] = 1
    """With `faster` or `ms`, the number of examples of *score* in a call that is timed."""
    unit: Unit | None = None
    """The sets that are removed together, see `Heads.units`; `keep` then counts these."""
    even: bool | dict[Any, Any] = False
    """True if every block keeps the same share of its heads. The pruned model is then a plain one of its library, if
    its config holds the width of a head; where heads share keys, this needs `unit="group"` too. In place of `keep`:
    how many heads a block keeps, by its number or name; blocks that are not named keep all."""
    divisible_by: Annotated[int, Ge(1)] = 1
    """With `even`, a number that divides the number of heads that every block keeps."""
    rescore_every: Annotated[int | None, Ge(1)] = None
    """The number of removed heads after which the smaller model is scored again. None scores only the dense model."""

    @classmethod
    def given(cls, keep: Number | Budget, how: Mapping[str, Any]) -> Budget:
        """Return the budget that the arguments of a method mean. Raises ValueError for an argument that is no field."""
        if isinstance(keep, Budget):
            return replace(keep, **how)
        if unknown := [name for name in how if name not in cls.__dataclass_fields__]:
            raise ValueError(f"{unknown[0]}: is no argument, must be {', '.join(cls.__dataclass_fields__)}")
        return cls(keep, **how)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, hint in get_type_hints(Budget, include_extras=True).items():
            check_type(name, getattr(self, name), hint)
        if self.cache_bytes is not None and (self.keep is not None or isinstance(self.even, dict)):
            raise ValueError(
                f"cache_bytes={self.cache_bytes}: says how many heads stay, as keep= or even= does; give one"
            )
        others = ("keep", "cache_bytes", "even", "ms")[: 4 if self.faster else 3]
        time, more = self.in_time, [name for name in others if getattr(self, name) not in (None, False)]
        if time and more:
            raise ValueError(f"{time}: says how many units stay, leave {more[0]}= out")
        if self.batch_size != 1 and not time and self.of != "time":
            raise ValueError(f"batch_size={self.batch_size}: needs faster= or ms=")
        if isinstance(self.even, dict) and self.keep is not None:
            raise ValueError(f"keep={self.keep}: even={self.even} says how many heads stay; leave one of them out")
        if self.of != "units" and (self.even or self.cache_bytes is not None):
            raise ValueError(f"of={self.of}: counts what all blocks together keep, leave even= and cache_bytes= out")
        if self.context > 1 and self.cache_bytes is None:
            raise ValueError(f"context={self.context}: needs cache_bytes=")
        if self.divisible_by > 1 and not self.even:
            raise ValueError(f"divisible_by={self.divisible_by}: needs even=True")

    @property
    def in_time(self) -> str:
        """The setting that says how fast the model shall be; empty if none does."""
        given = {name: value for name in ("faster", "ms") if (value := getattr(self, name)) is not None}
        return ", ".join(f"{name}={value:g}" for name, value in given.items())

    def wanted_ms(self, dense_ms: float) -> float:
        """Return the milliseconds that the smaller model shall take, given those of the dense model."""
        return dense_ms / self.faster if self.faster else float(self.ms or dense_ms)

    def kept(self, heads: ScoredHeads, least: Mapping[BlockId, int]) -> int:
        """Return the number of heads that stay. Raises ValueError for a number that is not possible."""
        if isinstance(self.even, dict):
            return sum(least.values())
        keep = 0.5 if self.keep is None else self.keep
        sizes, total = heads.grid.sizes, len(heads.grid)
        kept = sum(round(keep * size) for size in (sizes if self.even else (total,))) if is_share(keep) else int(keep)
        if not 0 <= kept <= total or (is_share(keep) and not 0 <= keep <= 1):
            raise ValueError(f"keep={keep}: must be a share of the heads, 0.0 to 1.0, or a number from 0 to {total}")
        if self.even and keep and not kept:
            raise ValueError(f"keep={keep}: leaves no whole number in any block of {max(sizes)}")
        if wrong := self.uneven(heads, kept):
            left = f"{kept * wrong[0] / total:.3g} of {wrong[0]}"
            which = f" that {self.divisible_by} divides" if self.divisible_by > 1 else ""
            raise ValueError(f"keep={keep}: leaves {left} in a block, must be a whole number{which}")
        return kept

    def kept_cost(self, total: float) -> float:
        """Return the number of weights or milliseconds that stay of those of all heads. Raises ValueError for more than
        these."""
        keep = 0.5 if self.keep is None else self.keep
        kept = float(keep * total if is_share(keep) else keep)
        if not 0 <= kept <= total:
            raise ValueError(f"keep={keep}: must be a share, 0.0 to 1.0, or a number from 0 to {total:.6g}")
        return kept

    def uneven(self, heads: ScoredHeads, kept: int) -> list[int]:
        """Return the sizes of the blocks of which no number divided by `divisible_by` stays, if all keep one share."""
        if self.even is not True:
            return []
        return [size for size in heads.grid.sizes if (kept * size / len(heads.grid)) % self.divisible_by]

    def bytes_for(self, heads: ScoredHeads) -> float:
        """Return `cache_bytes` in bytes. Raises ValueError for a size that no removal brings about."""
        given: Any = self.cache_bytes
        if not (whole := heads.cache_bytes(length=self.context)):
            raise ValueError(f"cache_bytes={given}: the model cannot generate, so it keeps no keys and values")
        named = heads.subject.by_name.items()
        cached = [block for name, block in named if name not in heads.subject.uncached(self.context)]
        if any(len(set(block.of_kv)) < block.heads for block in cached):
            if heads.units("group") is heads:
                raise ValueError(f"cache_bytes={given}: all heads of a layer share keys and values, which must stay")
            raise ValueError(f'cache_bytes={given}: heads share keys and values, write unit="group" too')
        least = heads.cache_bytes(HeadMask(heads.grid, frozenset(heads.grid)), length=self.context)
        if heads.subject.window is not None and least == whole:
            raise ValueError(
                f"context={self.context}: must be more than the window, {sum(heads.subject.window)} tokens"
            )
        budget = float(given * whole if is_share(given) else given)
        if not least <= budget <= whole:
            shares = f"{math.ceil(1000 * least / whole) / 1000} to 1.0"
            raise ValueError(f"cache_bytes={given}: must be a share, {shares}, or a number from {least} to {whole}")
        return budget


def choose(heads: ScoredHeads, budgets: Sequence[Budget], by: By, schedule: str | Schedule | None) -> list[HeadMask]:
    """Return a mask for each budget, all chosen in one call of the schedule. They differ only in `keep`."""
    if not budgets:
        return []
    unit, counts = budgets[0].unit, budgets[0].in_time or f"of={budgets[0].of}"
    if heads.subject.window is not None and counts != "of=units":
        raise ValueError(f"{counts}: heads that stream hold as many weights and read a text no faster, leave it out")
    if unit is not None and heads.subject.single is not None:
        raise ValueError(f"unit={unit}: these heads are sets of heads already, leave it out")
    if unit is not None and (grouped := heads.units(unit)) is not heads:
        found = choose(grouped, [replace(budget, unit=None) for budget in budgets], by, schedule)
        return [grouped.subject.mask_of_heads(mask) for mask in found]
    first = budgets[0]
    least = least_of(first.even, heads.grid, first.divisible_by) if isinstance(first.even, dict) else {}
    scorers, how = _way(heads, first, by, schedule)
    if first.even is not False:
        if not isinstance(how, Stepwise):
            raise ValueError(f"by={by}: with even= it must be a score, or a search that removes head by head")
        how = replace(how, keep_at_least=least) if least else replace(how, scope="per_block")
    if how.removes and heads.subject.window is not None:
        raise ValueError("schedule: scores smaller models, but heads that stream are scored once")
    if how.removes or first.cache_bytes is not None or first.in_time:
        heads.check_removable()
    spared = sparing(heads, how, least, heads.subject.uncached(first.context) if first.cache_bytes is not None else ())

    def masks(kept: Sequence[float], cost: Tensor | None = None) -> list[HeadMask]:
        total = len(heads.grid) if cost is None else float(cost.sum())
        for budget, count in zip(budgets, kept, strict=False):
            check_reachable(heads, spared, budget, count, cost)
        if any(ROUNDING < count < total - ROUNDING for count in kept):
            check_different(heads, scorers)
        made = choices(heads.scoring, scorers, spared, [total - count for count in kept], draws=1, cost=cost)
        return [plan.mask for plan in plans_of(made)]

    if first.in_time:
        return [mask_in_time(heads, each.wanted_ms, each.in_time, each.batch_size, masks) for each in budgets]
    if first.of != "units":
        cost = unit_costs(heads, first.batch_size)[1] if first.of == "time" else heads.subject.held_weights()
        if first.of == "operations":  # a weight is used once for a token; attention also reads all other tokens
            read = [2 * block.head_dim * block.attends for block in heads.subject.blocks for _ in block.names]
            cost = cost + heads.splits.score.lengths().double().mean() * torch.tensor(read)
        return masks([budget.kept_cost(float(cost.sum())) for budget in budgets], cost)
    if first.cache_bytes is None:
        return masks([budget.kept(heads, least) for budget in budgets])
    allowed, context, count = first.bytes_for(heads), first.context, len(heads.grid)
    largest = heads.subject.largest_in_cache(context)
    while True:  # the cache of the last head of a block cannot go, so bytes are measured, not added up
        while first.uneven(heads, count):
            count -= 1
        (mask,) = masks([count])
        if (over := heads.cache_bytes(mask, length=context) - allowed) <= 0:
            return [mask]
        count -= max(1, math.ceil(over / largest))


def check_reachable(heads: ScoredHeads, schedule: Schedule, budget: Budget, count: float, cost: Tensor | None) -> None:
    """Raise ValueError, in the words of the call, if more must stay than a budget allows: `count` units, or as much as
    they cost."""
    stay = [head in mask.kept for mask in [schedule.smallest(heads.grid)] for head in heads.grid]
    least = float(sum(stay)) if cost is None else float(cost[torch.tensor(stay)].sum())
    if count >= least - ROUNDING:
        return
    units, stuck = heads.subject.counted, heads.proven.stuck
    kept = f"keep={0.5 if budget.keep is None else budget.keep}"
    which = budget.in_time or (kept if budget.cache_bytes is None else f"cache_bytes={budget.cache_bytes}")
    asked = f"{count:.6g} {units}" if cost is None else f"{count:.6g} of={budget.of}"
    why = next((f", {block} for example: {reason}" for block, reason in stuck.items()), "")
    raise ValueError(f"{which}: keeps {asked}, but {least:.6g} must stay{why}")


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


def _way(
    heads: ScoredHeads, budget: Budget, by: By, schedule: str | Schedule | None
) -> tuple[dict[str, Scorer], Schedule]:
    """Return the scorer by its name, none for a schedule that uses no scores, and the schedule."""
    chosen: Any = option(by, {"scorer": Scorer, "schedule": Schedule}) if isinstance(by, str) else by
    given: Any = option(schedule, {"schedule": Schedule}) if isinstance(schedule, str) else schedule
    if isinstance(chosen, Schedule):
        if chosen.scoring != "none":
            raise ValueError(f"by={by}: uses scores; name a score by= and this as schedule=")
        if given is not None or budget.rescore_every is not None:
            more = "schedule" if given is not None else "rescore_every"
            raise ValueError(f"by={by}: is a schedule that uses no scores, leave {more}= out")
        return {}, chosen
    if given is not None and budget.rescore_every is not None:
        raise ValueError("rescore_every: is a setting of the schedule iterative, leave it or schedule= out")
    if given is None:
        given = OneShot() if budget.rescore_every is None else Iterative(every=budget.rescore_every)
    if given.scoring == "none":
        return {}, given
    scorer = chosen if isinstance(chosen, Scorer) else scores_of(by, heads.grid)
    return named_scorers(heads.subject, [by if isinstance(by, str) else scorer]), given


def sparing(
    heads: ScoredHeads, schedule: Schedule, least: Mapping[BlockId, int], useless: Collection[BlockId] = ()
) -> Schedule:
    """Return the schedule so that it keeps the heads that cannot be removed, and those of the blocks `useless`, whose
    removal is none of what is asked for. `least` are numbers to keep by block. Raises `Unsupported` for a schedule that
    cannot."""
    stuck = {**dict.fromkeys(useless, "it keeps nothing in the cache"), **heads.proven.stuck}
    if not stuck or heads.proven.why_not:
        return schedule
    sizes = dict(zip(heads.grid.blocks, heads.grid.sizes, strict=True))
    uneven = [block for block in stuck if least.get(block, sizes[block]) < sizes[block]]
    if not isinstance(schedule, Stepwise) or schedule.scope == "per_block" or uneven:
        block, reason = next(iter(stuck.items()))
        what = "stay" if block in useless else "can be gated, not removed"
        raise Unsupported(f"heads of {block} {what}: {reason}; a score, or a search head by head, spares them")
    return replace(
        schedule, keep_at_least={block: sizes[block] if block in stuck else least.get(block, 0) for block in sizes}
    )
