"""Score the heads once, and remove those with the lowest scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mhaprune.heads import HeadId, HeadMask
from mhaprune.schedules.base import ROUNDING, Evidence, Stepwise


@dataclass(frozen=True)
class OneShot(Stepwise):
    """The heads with the lowest scores in the dense model are removed (Michel et al. 2019, section 4), or those with
    the lowest score per cost if budgets are costs. If scores are equal, the first head in the grid is removed first."""

    scoring = "once"

    def path(self, evidence: Evidence) -> Iterator[HeadMask]:
        mask = HeadMask(evidence.subject.grid)
        yield mask
        for head in self._order(evidence):
            mask = mask.without(head)
            yield mask

    def __call__(self, evidence: Evidence, budgets: Sequence[float]) -> list[HeadMask]:
        """Return what the masks of `path` say, without those that no budget asks for: there may be thousands."""
        self._most(evidence, budgets)
        order, cost = list(self._order(evidence)), evidence.costs()
        removed = [0.0, *accumulate(cost[head] for head in order)]
        counts = [next(n for n, gone in enumerate(removed) if gone >= budget - ROUNDING) for budget in budgets]
        return [HeadMask(evidence.subject.grid, frozenset(order[:count])) for count in counts]

    def _order(self, evidence: Evidence) -> Iterator[HeadId]:
        mask = HeadMask(evidence.subject.grid)
        score = dict(zip(mask.grid, evidence.score(evidence.subject).tolist(), strict=True))
        return self.weakest_first(evidence, mask, score)
