"""Sizes of a smaller model: a number of heads, of weights, of bytes in its cache, or a speed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mhaprune.api.parsing import least_of
from mhaprune.api.promise import mask_in_time, unit_costs
from mhaprune.api.scored_heads import ScoredHeads
from mhaprune.heads import BlockId, HeadMask, is_share
from mhaprune.schedules.base import ROUNDING, Stepwise

Masks = Callable[[Sequence[float], Tensor | None], list[HeadMask]]
"""A function that returns a mask for each number of units that stay; given a cost (N,) of the units, for each cost of
all units that stay."""


@dataclass(frozen=True)
class Size(ABC):
    """One size, in the one way in which it was asked for."""

    by_removal: ClassVar[bool] = False
    """True if only a removal brings the size about, not a closed head."""

    @property
    @abstractmethod
    def words(self) -> str:
        """The setting as it was typed."""

    @property
    def what(self) -> str:
        """The unit of a cost."""
        return "ms"

    def evened(self, heads: ScoredHeads, schedule: Stepwise) -> Stepwise | None:
        """Return the schedule so that it chooses within each block; None for a size of the whole model."""
        return None

    def useless(self, heads: ScoredHeads) -> Collection[BlockId]:
        """Return the blocks whose removal brings nothing."""
        return ()

    @abstractmethod
    def masks(self, sizes: Sequence[Any], heads: ScoredHeads, masks: Masks) -> list[HeadMask]:
        """Return the masks of several sizes of this class, which differ only in a number. Raises ValueError for a size
        that is not possible."""


@dataclass(frozen=True)
class Count(Size):
    """A number of units, or a share of them."""

    keep: float

    @property
    def words(self) -> str:
        return f"keep={self.keep}"

    def kept(self, heads: ScoredHeads) -> int:
        return number_kept(self.keep, [len(heads.grid)])

    def masks(self, sizes: Sequence[Count], heads: ScoredHeads, masks: Masks) -> list[HeadMask]:
        return masks([size.kept(heads) for size in sizes], None)


@dataclass(frozen=True)
class Even(Size):
    """One share of the units of every block."""

    keep: float
    divisible_by: int
    """A number that divides the number of units which every block keeps."""

    @property
    def words(self) -> str:
        return f"keep={self.keep}"

    def evened(self, heads: ScoredHeads, schedule: Stepwise) -> Stepwise:
        return replace(schedule, scope="per_block")

    def uneven(self, heads: ScoredHeads, kept: int) -> list[int]:
        """Return the sizes of the blocks of which no number divided by `divisible_by` stays, if `kept` units stay."""
        return [size for size in heads.grid.sizes if (kept * size / len(heads.grid)) % self.divisible_by]

    def kept(self, heads: ScoredHeads) -> int:
        sizes, total = heads.grid.sizes, len(heads.grid)
        kept = number_kept(self.keep, sizes)
        if self.keep and not kept:
            raise ValueError(f"keep={self.keep}: leaves no whole number in any block of {max(sizes)}")
        if wrong := self.uneven(heads, kept):
            left = f"{kept * wrong[0] / total:.3g} of {wrong[0]}"
            which = f" that {self.divisible_by} divides" if self.divisible_by > 1 else ""
            raise ValueError(f"keep={self.keep}: leaves {left} in a block, must be a whole number{which}")
        return kept

    def masks(self, sizes: Sequence[Even], heads: ScoredHeads, masks: Masks) -> list[HeadMask]:
        return masks([size.kept(heads) for size in sizes], None)


@dataclass(frozen=True)
class PerBlock(Size):
    """A number of units for each block."""

    even: Mapping[Any, Any]
    """The numbers by block, or by its layer; blocks that are not named keep all."""
    divisible_by: int
    """A number that divides all of these."""

    @property
    def words(self) -> str:
        return f"even={self.even}"

    def evened(self, heads: ScoredHeads, schedule: Stepwise) -> Stepwise:
        return replace(schedule, keep_at_least=least_of(self.even, heads.grid, self.divisible_by))

    def masks(self, sizes: Sequence[PerBlock], heads: ScoredHeads, masks: Masks) -> list[HeadMask]:
        return masks([sum(least_of(size.even, heads.grid, size.divisible_by).values()) for size in sizes], None)


@dataclass(frozen=True)
class Cost(Size):
    """A number or a share of the weights, operations or milliseconds of all units."""

    keep: float
    of: str
    """The name of what is counted, see `Budget.of`."""
    batch_size: int
    """For milliseconds, the number of examples in a call."""

    @property
    def words(self) -> str:
        return f"keep={self.keep}"

    @property
    def what(self) -> str:
        return f"of={self.of}"

    def kept(self, total: float) -> float:
        kept = float(self.keep * total if is_share(self.keep) else self.keep)
        if not 0 <= kept <= total:
            raise ValueError(f"keep={self.keep}: must be a share, 0.0 to 1.0, or a number from 0 to {total:.6g}")
        return kept

    def cost(self, subject: Any, heads: ScoredHeads) -> Tensor:
        """Return the cost of each unit, (N,), of the model or of a smaller one."""
        if self.of == "time":
            return unit_costs(heads, self.batch_size)[1]
        cost: Tensor = subject.held_weights()
        if self.of == "operations":  # a weight is used once for a token; attention also reads all other tokens
            read = [2 * block.head_dim * (block.kind == "head") for block in subject.blocks for _ in block.names]
            cost = cost + heads.splits.score.lengths().double().mean() * torch.tensor(read)
        return cost

    def masks(self, sizes: Sequence[Cost], heads: ScoredHeads, masks: Masks) -> list[HeadMask]:
        cost = self.cost(heads.subject, heads)
        single = self.of != "time" and heads.subject.single is None and not heads.proven.why_not
        if single and any(len({*block.of_kv}) < block.heads for block in heads.subject.blocks if block.kind == "head"):
            return [size._mask(heads, masks, cost) for size in sizes]
        return masks([size.kept(float(cost.sum())) for size in sizes], cost)

    def _mask(self, heads: ScoredHeads, masks: Masks, cost: Tensor) -> HeadMask:
        """Return the mask of heads that share keys and values, which stay as long as one of these heads does, or are
        copied for each: so what is left is counted in the smaller model."""
        allowed = asked = self.kept(float(cost.sum()))
        while True:
            (mask,) = masks([asked], cost)
            left = float(self.cost(heads.subject.without(mask, shared=True), heads).sum())
            if left <= allowed * (1 + ROUNDING) or not mask.kept:
                return mask
            asked = max(0.0, asked - max(float(cost.min()), (left - allowed) / 4))


@dataclass(frozen=True)
class Speed(Size):
    """A speed of a call: times as fast as the dense model, or milliseconds."""

    by_removal = True

    faster: float | None
    ms: float | None
    batch_size: int
    """The number of examples in the call."""

    @property
    def words(self) -> str:
        return f"faster={self.faster:g}" if self.faster else f"ms={self.ms:g}"

    def wanted(self, dense_ms: float) -> float:
        """Return the milliseconds that the smaller model shall take, given those of the dense model."""
        return dense_ms / self.faster if self.faster else float(self.ms or dense_ms)

    def masks(self, sizes: Sequence[Speed], heads: ScoredHeads, masks: Masks) -> list[HeadMask]:
        return [mask_in_time(heads, size.wanted, size.words, size.batch_size, masks) for size in sizes]


@dataclass(frozen=True)
class CacheSize(Size):
    """A size of the key-value cache: bytes, or a share of the dense model's."""

    by_removal = True

    cache_bytes: float
    context: int
    """The number of positions in the cache."""
    even: Even | None
    """The size of blocks, if all shall keep the same share of their units."""

    @property
    def words(self) -> str:
        return f"cache_bytes={self.cache_bytes}"

    def evened(self, heads: ScoredHeads, schedule: Stepwise) -> Stepwise | None:
        return None if self.even is None else self.even.evened(heads, schedule)

    def useless(self, heads: ScoredHeads) -> Collection[BlockId]:
        return heads.subject.uncached(self.context)

    def allowed(self, heads: ScoredHeads) -> float:
        """Return the size in bytes. Raises ValueError for a size that no removal brings about."""
        given = self.cache_bytes
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
        allowed = float(given * whole if is_share(given) else given)
        if not least <= allowed <= whole:
            shares = f"{math.ceil(1000 * least / whole) / 1000} to 1.0"
            raise ValueError(f"cache_bytes={given}: must be a share, {shares}, or a number from {least} to {whole}")
        return allowed

    def masks(self, sizes: Sequence[CacheSize], heads: ScoredHeads, masks: Masks) -> list[HeadMask]:
        return [size._mask(heads, masks) for size in sizes]

    def _mask(self, heads: ScoredHeads, masks: Masks) -> HeadMask:
        allowed, count, largest = self.allowed(heads), len(heads.grid), heads.subject.largest_in_cache(self.context)
        while True:  # the cache of the last head of a block cannot go, so bytes are measured, not added up
            while self.even is not None and self.even.uneven(heads, count):
                count -= 1
            (mask,) = masks([count], None)
            if (over := heads.cache_bytes(mask, length=self.context) - allowed) <= 0:
                return mask
            count -= max(1, math.ceil(over / largest))


def number_kept(keep: float, sizes: Sequence[int]) -> int:
    """Return the number of units that stay of blocks of these sizes: a share of each block, rounded, or `keep` in all.
    Raises ValueError for a number that is not possible."""
    kept, total = sum(round(keep * size) for size in sizes) if is_share(keep) else int(keep), sum(sizes)
    if not 0 <= kept <= total or (is_share(keep) and not 0 <= keep <= 1):
        raise ValueError(f"keep={keep}: must be a share of the heads, 0.0 to 1.0, or a number from 0 to {total}")
    return kept
