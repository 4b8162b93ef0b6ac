"""What every way of choosing promises, and what a budget means.

Dimensions: N = all heads of the subject, M = masks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from tqdm import tqdm

from mhaprune.heads import HeadGrid, HeadId, HeadMask
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Judge:
    """What a schedule may ask about a subject, all of it answered on the *score* split.

    `score` gives (N,) for the subject or a copy of it with heads removed; `loss` the mean loss in nats under each of
    many masks, (M,).
    """

    subject: Subject
    score: Callable[[Subject], Tensor]
    loss: Callable[[Sequence[HeadMask]], Tensor]


@dataclass(frozen=True)
class Schedule(ABC):
    """A way to choose which heads go."""

    @abstractmethod
    def asks(self) -> Literal["once", "again", "never"]:
        """How often scorers have a say: for the whole model, again for what is left of it, or not at all."""

    @abstractmethod
    def most(self, grid: HeadGrid) -> int:
        """How many heads it can remove."""

    @abstractmethod
    def __call__(self, judge: Judge, budgets: Sequence[int]) -> list[HeadMask]:
        """One mask per budget, each with exactly that many heads removed."""


@dataclass(frozen=True)
class Stepwise(Schedule):
    """A schedule that removes one head after the other.

    `scope=global` compares all heads of the model, `per_block` those of the blocks that have most of theirs left.
    Every block keeps at least `keep_at_least` heads.
    """

    scope: Literal["global", "per_block"] = "global"
    keep_at_least: int = 0

    def __post_init__(self) -> None:
        if self.keep_at_least < 0:
            raise ValueError(f"keep_at_least={self.keep_at_least}: must be 0 or more heads of each block")

    @abstractmethod
    def path(self, judge: Judge) -> Iterator[HeadMask]:
        """Masks from none removed on, each with one head more than the one before, to where no head may go."""

    def most(self, grid: HeadGrid) -> int:
        return sum(max(0, size - self.keep_at_least) for size in grid.sizes)

    def __call__(self, judge: Judge, budgets: Sequence[int]) -> list[HeadMask]:
        masks: list[HeadMask] = []
        last = max(budgets, default=0)
        for mask in tqdm(self.path(judge), "choosing heads", last + 1, disable=None, leave=False):
            masks.append(mask)
            if len(masks) > last:
                break
        return [masks[budget] for budget in budgets]

    def removable(self, mask: HeadMask) -> list[HeadId]:
        """The heads that may go next, in the order of the grid."""
        kept = Counter(head.block for head in mask.kept)
        spare = {block for block, count in kept.items() if count > self.keep_at_least}
        if self.scope == "per_block" and spare:
            sizes = dict(zip(mask.grid.blocks, mask.grid.sizes, strict=True))
            most_left = max(kept[block] / sizes[block] for block in spare)
            spare = {block for block in spare if kept[block] / sizes[block] == most_left}
        return [head for head in mask.kept if head.block in spare]


def check_budgets(budgets: Sequence[int | float]) -> None:
    """Raise ValueError unless every budget is a fraction from 0.0 to 1.0 or a whole number of heads."""
    for budget in budgets:
        if not 0 <= budget <= (1 if isinstance(budget, float) else math.inf):
            raise ValueError(f"budgets={budget}: a fraction must be from 0.0 to 1.0, a number of heads 0 or more")


def heads_to_remove(budgets: Sequence[int | float], num_heads: int, most: int | None = None) -> list[int]:
    """Budgets as numbers of heads, ascending, none twice, 0 always among them.

    A fraction becomes the nearest whole number of heads. Raises ValueError for more heads than there are, or than the
    `most` that may go.
    """
    check_budgets(budgets)
    counts = {round(budget * num_heads) if isinstance(budget, float) else budget for budget in budgets}
    if max(counts, default=0) > num_heads:
        raise ValueError(
            f"experiment.budgets={max(counts)}: the model has {num_heads} heads, allowed are 0 to {num_heads}"
        )
    if most is not None and max(counts, default=0) > most:
        raise ValueError(
            f"experiment.budgets={max(counts)}: with schedule.keep_at_least heads left in every block only {most} of"
            f" {num_heads} may go, allowed are 0 to {most}"
        )
    return sorted(counts | {0})
