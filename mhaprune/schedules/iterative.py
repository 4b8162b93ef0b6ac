"""Score, remove a few heads, score the smaller model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from mhaprune.heads import HeadMask
from mhaprune.schedules.base import Evidence, Stepwise
from mhaprune.settings.ranges import Ge


@dataclass(frozen=True)
class Iterative(Stepwise):
    """The heads of lowest score go, then the model without them is scored again (Molchanov et al. 2017, figure 1).

    A single scoring can take two heads for idle that replace each other. The second scoring sees that one is gone.
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
            for _ in range(self.every):
                if candidates := self.removable(evidence, mask):
                    mask = mask.without(min(candidates, key=score.__getitem__))
                    yield mask
