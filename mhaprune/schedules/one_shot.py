"""Score once, remove the lowest."""

from collections.abc import Iterator
from dataclasses import dataclass

from mhaprune.heads import HeadMask
from mhaprune.schedules.base import Evidence, Stepwise


@dataclass(frozen=True)
class OneShot(Stepwise):
    """The heads of lowest score in the whole model go. Ties go in the order of the heads (Michel et al. 2019, section
    4)."""

    scoring = "once"

    def path(self, evidence: Evidence) -> Iterator[HeadMask]:
        mask = HeadMask(evidence.subject.grid)
        score = dict(zip(mask.kept, evidence.score(evidence.subject).tolist(), strict=True))
        yield mask
        while candidates := self.removable(evidence, mask):
            mask = mask.without(min(candidates, key=score.__getitem__))
            yield mask
