"""Choose the heads of one block after the other, and refit the model in between."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from mhaprune.heads import HeadGrid, HeadId, HeadMask
from mhaprune.progress import track
from mhaprune.schedules.base import Evidence, Schedule, all_but
from mhaprune.settings.ranges import Ge


@dataclass(frozen=True)
class BottomUp(Schedule):
    """The order of K-prune (Park, Choi & Kang 2024): the heads of one block are settled before those of the next.

    For each block in turn, the heads of this block and of all later blocks are scored, on the model that has lost the
    heads settled so far and was refitted (`recoveries.refitting`, only W_O). Of these heads, the ones with the lowest
    scores would meet the budget. Those of them in this block are removed; the later blocks are scored again.

    Blocks come in the order of the grid, which for an encoder-decoder is not the order of computation. Use it with
    `recovery=[refit]`. The scorer of the paper is `knowledge`.
    """

    examples: Annotated[int, Ge(4)] = 512
    """Number of examples of the *score* split, of which every second is read for the refits."""

    scoring = "repeated"

    def smallest(self, grid: HeadGrid) -> HeadMask:
        return all_but(0, grid)

    def __call__(self, evidence: Evidence, budgets: Sequence[float]) -> list[HeadMask]:
        """Return a mask for each budget, each chosen from the beginning. Raises ValueError for a budget that is too
        large."""
        if evidence.cost is not None:
            raise ValueError("schedule=bottom_up: removes numbers of heads, not weights")
        heads, most = len(evidence.subject.grid), max(budgets, default=0)
        if most > heads:
            raise ValueError(f"budgets={most}: cannot be met, 0 heads must stay")
        refits = evidence.refits(self.examples)
        return [self._mask(evidence, refits, round(budget)) for budget in track(budgets, "choosing heads", name=str)]

    def _mask(self, evidence: Evidence, refits: Any, budget: int) -> HeadMask:
        grid = evidence.subject.grid
        mask, scored, score = HeadMask(grid), None, dict[HeadId, float]()
        for place, block in enumerate(grid.blocks):
            missing = budget - len(mask.removed)
            if not missing:
                break
            if mask != scored:
                left = refits.without(mask) if mask.removed else evidence.subject
                score, scored = dict(zip(left.grid, evidence.score(left).tolist(), strict=True)), mask
            open_blocks = set(grid.blocks[place:])
            weakest = sorted((head for head in mask.kept if head.block in open_blocks), key=score.__getitem__)[:missing]
            mask = HeadMask(grid, mask.removed | {head for head in weakest if head.block == block})
        return mask
