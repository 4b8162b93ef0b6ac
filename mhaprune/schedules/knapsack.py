"""Keep the heads with the largest sum of scores within the budget.

Dimensions: P = points on the front of the blocks so far, C = choices of the next block, L = blocks so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from mhaprune.heads import HeadGrid, HeadId, HeadMask
from mhaprune.schedules.base import Evidence, Schedule, all_but
from mhaprune.schedules.budgets import Budget
from mhaprune.settings.ranges import Ge


@dataclass(frozen=True)
class Knapsack(Schedule):
    """Of all sets of heads within the budget, the set with the largest sum of scores is kept.

    Other schedules remove the heads with the lowest scores, whatever these heads cost. This schedule also counts the
    cost of a block, which is saved if the block loses all its heads. The heads of a block cost the same, so the choice
    is how many of the best heads of each block to keep: a multiple-choice knapsack (Kellerer et al. 2004, chapter 11;
    for blocks of a language model Bercovich et al. 2024). It is solved exactly, block by block, on the Pareto front of
    cost and score.

    A sum of scores is meaningful if a score is a rise of the loss, as for `ablation`. A head with a score below zero is
    removed even if the budget allows it, so scores that are never above zero, such as `entropy`, empty the model. With
    a budget in heads, the choice is that of `one_shot`, whatever the scores are.
    """

    keep_at_least: Annotated[int, Ge(0)] = 0
    """Number of heads that stay in every block."""

    scoring = "once"

    def smallest(self, grid: HeadGrid) -> HeadMask:
        return all_but(self.keep_at_least, grid)

    def __call__(self, evidence: Evidence, budgets: Sequence[Budget]) -> list[HeadMask]:
        """Return a mask for each budget. Raises ValueError for a budget that it cannot meet."""
        grid = evidence.subject.grid
        score = dict(zip(grid, evidence.score(evidence.subject).tolist(), strict=True))
        return [self._choose(grid, score, budget) for budget in budgets]

    def _choose(self, grid: HeadGrid, score: dict[HeadId, float], budget: Budget) -> HeadMask:
        costs_P, values_P = np.array([budget.cost.floor]), np.zeros(1)
        counts_PL = np.zeros((1, 0), dtype=int)
        worst_first = [
            sorted((head for head in grid if head.block == block), key=score.__getitem__) for block in grid.blocks
        ]
        for block, heads in zip(grid.blocks, worst_first, strict=True):
            choices_C = np.arange(min(self.keep_at_least, len(heads)), len(heads) + 1)
            costs_C = np.array([budget.cost.of_block(block, count) for count in choices_C.tolist()])
            values_C = np.cumsum([0.0, *(score[head] for head in reversed(heads))])[choices_C]
            costs, values = np.add.outer(costs_P, costs_C).ravel(), np.add.outer(values_P, values_C).ravel()
            counts = np.column_stack([counts_PL.repeat(len(choices_C), axis=0), np.tile(choices_C, len(costs_P))])
            best = _front(costs, values, every_cost=budget.cost.unit == "heads")
            costs_P, values_P, counts_PL = costs[best], values[best], counts[best]
        met = np.flatnonzero(costs_P <= budget.most)
        if not len(met):
            stay = len(self.smallest(grid).kept)
            raise ValueError(f"budgets={budget.name}: cannot be met, {stay} heads must stay")
        gone = [heads[: len(heads) - n] for heads, n in zip(worst_first, counts_PL[met[-1]], strict=True)]
        return HeadMask(grid, frozenset(head for heads in gone for head in heads))


def _front(costs: np.ndarray, values: np.ndarray, every_cost: bool) -> np.ndarray:
    """Return the indices of the points (cost, value) to keep, by ascending cost. Without `every_cost`, keep each point
    that has more value than every cheaper point. With it, keep the point of most value at each cost."""
    order = np.lexsort((-values, costs))
    if every_cost:
        return order[np.diff(costs[order], prepend=-np.inf) > 0]
    best_before = np.maximum.accumulate(np.concatenate([[-np.inf], values[order][:-1]]))
    return order[values[order] > best_before]
