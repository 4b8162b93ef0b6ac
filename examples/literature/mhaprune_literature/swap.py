"""Exchange a kept head for a removed one as long as that lowers the loss."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.schedules.base import Evidence, Schedule, Stepwise, least_in
from mhaprune.schedules.one_shot import OneShot


@dataclass(frozen=True)
class Swap(Schedule):
    """A choice of heads by another schedule, improved by exchanges.

    Each exchange removes one kept head and brings back one removed head. The exchange that lowers the loss most is
    made, until none lowers it.
    """

    start: Stepwise = field(default_factory=OneShot)
    """The schedule of the first choice. Its `scope` and `keep_at_least` apply to the exchanges too."""

    @property
    def scoring(self) -> Literal["once", "repeated", "none"]:
        return self.start.scoring

    @property
    def removes(self) -> bool:
        return self.start.removes

    def smallest(self, grid: HeadGrid) -> HeadMask:
        return self.start.smallest(grid)

    def __call__(self, evidence: Evidence, budgets: Sequence[float]) -> list[HeadMask]:
        improved = []
        for mask in self.start(evidence, budgets):
            loss = float(evidence.loss([mask]))
            while exchanges := self._exchanges(mask):
                losses = evidence.loss(exchanges)
                best = int(losses.argmin())
                if not losses[best] < loss:
                    break
                mask, loss = exchanges[best], float(losses[best])
            improved.append(mask)
        return improved

    def _exchanges(self, mask: HeadMask) -> list[HeadMask]:
        kept = Counter(head.block for head in mask.kept)
        exchanges = []
        for back in sorted(mask.removed, key=mask.grid.index):
            for gone in mask.kept:
                least = least_in(gone.block, self.start.keep_at_least)
                spare = self.start.scope == "global" and kept[gone.block] > least
                if spare or back.block == gone.block:
                    exchanges.append(HeadMask(mask.grid, mask.removed - {back} | {gone}))
        return exchanges
