"""Remove the head whose removal raises the loss least, one head at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

from mhaprune.heads import HeadMask
from mhaprune.schedules.base import Evidence, Stepwise


@dataclass(frozen=True)
class Greedy(Stepwise):
    """Each step removes the head whose removal raises the loss least. This is measured on the model without the heads
    that were removed before (backward elimination, Marill & Green 1963). It uses no scores."""

    scoring = "none"

    def path(self, evidence: Evidence) -> Iterator[HeadMask]:
        mask = HeadMask(evidence.subject.grid)
        yield mask
        while candidates := [mask.without(head) for head in self.removable(evidence, mask)]:
            mask = candidates[int(evidence.loss(candidates).argmin())]
            yield mask
