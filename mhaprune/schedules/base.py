"""The base of schedules.

Dimensions: N = all heads of the subject, M = masks, E = examples.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor

from mhaprune.heads import BlockId, HeadGrid, HeadId, HeadMask
from mhaprune.progress import track
from mhaprune.settings.ranges import Checked, Ge
from mhaprune.subject import Subject

ROUNDING = 1e-6
"""The most by which the sum of costs may miss a budget."""


def not_given(*_: object) -> Any:
    raise AssertionError("the schedule reads what it was not given")


@dataclass(frozen=True)
class Evidence:
    """The facts about a subject that a schedule may use: scores, losses and gradients, all from the *score* split, but
    no examples.

    So a schedule can choose heads by this split only.
    """

    subject: Subject
    """The model that heads are chosen from."""
    score: Callable[[Subject], Tensor]
    """A function that returns the score of every head, (N,), of the subject or of a pruned copy of it."""
    loss: Callable[[Sequence[HeadMask]], Tensor]
    """A function that returns the mean loss in nats under each mask, (M,)."""
    whole: HeadGrid | None = None
    """The heads before any were removed. None means the heads of the subject."""
    gradients: Callable[[], Tensor] = not_given
    """A function that returns the derivative of the loss of every example with respect to every gate, (E, N)."""
    refits: Callable[[int], Any] = not_given
    """A function that returns a `pruning.plans.Refits` for a given number of examples."""
    cost: Tensor | None = None
    """The cost of every head of the subject, (N,), in the unit of the budgets; None for 1 each, so that budgets are
    numbers of heads."""

    def costs(self) -> dict[HeadId, float]:
        """Return the cost of every head of the subject."""
        grid = self.subject.grid
        return dict.fromkeys(grid, 1.0) if self.cost is None else dict(zip(grid, self.cost.tolist(), strict=True))


@dataclass(frozen=True)
class Schedule(Checked, ABC):
    """A method that chooses heads to remove. Most schedules remove one head after the other: they are `Stepwise`.

    >>> @dataclass(frozen=True)
    ... class LastFirst(Stepwise):
    ...     '''The last head of the model is removed first.'''
    ...
    ...     scoring = "none"
    ...
    ...     def path(self, evidence):
    ...         mask = HeadMask(evidence.subject.grid)
    ...         yield mask
    ...         while heads := self.removable(evidence, mask):
    ...             mask = mask.without(heads[-1])
    ...             yield mask
    >>> [str(head) for head in heads.mask(keep=2, by=LastFirst()).kept]
    ['attention.0.0', 'attention.0.1']
    """

    @property
    @abstractmethod
    def scoring(self) -> Literal["once", "repeated", "none"]:
        """The models whose scores the schedule uses: only the dense model, each smaller model too, or none."""

    @property
    def removes(self) -> bool:
        """True if the schedule measures models with heads removed. Otherwise masked models are enough."""
        return self.scoring == "repeated"

    @abstractmethod
    def smallest(self, grid: HeadGrid) -> HeadMask:
        """Return the mask with the most heads removed that the schedule allows."""

    @abstractmethod
    def __call__(self, evidence: Evidence, budgets: Sequence[float]) -> list[HeadMask]:
        """Return one mask per budget, the cost of the heads to remove from the subject: see `Evidence.cost`."""


def all_but(keep_at_least: int | Mapping[BlockId, int], grid: HeadGrid) -> HeadMask:
    """Return the mask that keeps this number of heads in every block; smaller blocks keep all their heads."""
    left = Counter(head.block for head in grid)
    removed = set()
    for head in grid:
        if left[head.block] > least_in(head.block, keep_at_least):
            left[head.block] -= 1
            removed.add(head)
    return HeadMask(grid, frozenset(removed))


def least_in(block: BlockId, keep_at_least: int | Mapping[BlockId, int]) -> int:
    """Return the number of heads that must stay in a block."""
    return keep_at_least if isinstance(keep_at_least, int) else keep_at_least[block]


@dataclass(frozen=True)
class Stepwise(Schedule):
    """A schedule that removes one head after the other."""

    scope: Literal["global", "per_block"] = "global"
    """The heads that compete for removal: all heads of the model, or only heads in the blocks that have the largest
    share of their heads left."""
    keep_at_least: Annotated[int, Ge(0)] | dict[BlockId, int] = 0
    """Number of heads that stay in every block; in Python also the numbers by block."""

    @abstractmethod
    def path(self, evidence: Evidence) -> Iterator[HeadMask]:
        """Yield masks, from none removed to the most allowed, each with one more removed head than the mask before."""

    def smallest(self, grid: HeadGrid) -> HeadMask:
        return all_but(self.keep_at_least, grid)

    def __call__(self, evidence: Evidence, budgets: Sequence[float]) -> list[HeadMask]:
        """Return for each budget the first mask that removes as much. Raises ValueError for a budget that is too
        large."""
        cost = evidence.costs()
        most = self._most(evidence, budgets)
        masks: dict[float, HeadMask] = {}
        for mask in track(self.path(evidence), "choosing heads", len(self.smallest(evidence.subject.grid).removed) + 1):
            removed = sum(cost[head] for head in mask.removed)
            masks |= {budget: mask for budget in budgets if budget not in masks and removed >= budget - ROUNDING}
            if removed >= most - ROUNDING:
                break
        return [masks[budget] for budget in budgets]

    def _most(self, evidence: Evidence, budgets: Sequence[float]) -> float:
        """Return the largest budget. Raises ValueError if it is too large."""
        smallest, most, cost = self.smallest(evidence.subject.grid), max(budgets, default=0), evidence.costs()
        if most > sum(cost[head] for head in smallest.removed) + ROUNDING:
            raise ValueError(f"budgets={most:g}: cannot be met, {len(smallest.kept)} heads must stay")
        return most

    def weakest_first(self, evidence: Evidence, mask: HeadMask, score: Mapping[HeadId, float]) -> Iterator[HeadId]:
        """Yield the heads that may be removed from a mask one after the other, those with the lowest score per cost
        first; of equal ones, the first in the grid."""
        cost, left = evidence.costs(), Counter(head.block for head in mask.kept)
        ordered = sorted(mask.kept, key=lambda head: score[head] / cost[head])
        place = {head: n for n, head in enumerate(ordered)}
        queues: dict[BlockId, list[HeadId]] = {block: [] for block in left}
        for head in reversed(ordered):  # so that the next one of a block is its last
            queues[head.block].append(head)
        while blocks := self._competing(evidence, left):
            head = min((queues[block][-1] for block in blocks), key=place.__getitem__)
            queues[head.block].pop()
            left[head.block] -= 1
            yield head

    def removable(self, evidence: Evidence, mask: HeadMask) -> list[HeadId]:
        """Return the heads that may be removed next, in the order of the grid."""
        blocks = set(self._competing(evidence, Counter(head.block for head in mask.kept)))
        return [head for head in mask.kept if head.block in blocks]

    def _competing(self, evidence: Evidence, left: Mapping[BlockId, int]) -> list[BlockId]:
        """Return the blocks whose heads compete for removal, given how many heads each has left."""
        spare = [block for block, count in left.items() if count > least_in(block, self.keep_at_least)]
        if self.scope == "global" or not spare:
            return spare
        whole = evidence.whole or evidence.subject.grid
        sizes = dict(zip(whole.blocks, whole.sizes, strict=True))
        most_left = max(left[block] / sizes[block] for block in spare)
        return [block for block in spare if left[block] / sizes[block] == most_left]
