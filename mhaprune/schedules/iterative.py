"""Score the heads, remove a few, and score the smaller model."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

from mhaprune.heads import HeadMask
from mhaprune.schedules.base import Evidence, Stepwise
from mhaprune.settings.ranges import Ge


@dataclass(frozen=True)
class Iterative(Stepwise):
    """The heads with the lowest scores are removed, then the smaller model is scored again (Molchanov et al. 2017,
    figure 1).

    If two heads can replace each other, a single scoring may rate both as useless. A second scoring, without one of
    them, does not.
    """

    every: Annotated[int, Ge(1)] = 1
    """Number of heads to remove between two scorings."""

    scoring = "repeated"

    def path(self, evidence: Evidence) -> Iterator[HeadMask]:
        mask = HeadMask(evidence.subject.grid)
        yield mask
        while self.removable(evidence, mask):
            left = evidence.subject.without(mask) if mask.removed else evidence.subject
            score = dict(zip(mask.kept, evidence.score(left).tolist(), strict=True))
            for head in islice(self.weakest_first(evidence, mask, score), self.every):
                mask = mask.without(head)
                yield mask
