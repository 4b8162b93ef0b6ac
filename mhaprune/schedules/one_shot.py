"""Score the heads once, and remove those with the lowest scores."""

from collections.abc import Iterator
from dataclasses import dataclass

from mhaprune.heads import HeadMask
from mhaprune.schedules.base import Evidence, Stepwise


@dataclass(frozen=True)
class OneShot(Stepwise):
    """The heads with the lowest scores in the dense model are removed (Michel et al. 2019, section 4). If scores are
    equal, the first head in the grid is removed first."""

    scoring = "once"

    def path(self, evidence: Evidence) -> Iterator[HeadMask]:
        mask = HeadMask(evidence.subject.grid)
        score = dict(zip(mask.kept, evidence.score(evidence.subject).tolist(), strict=True))
        yield mask
        while candidates := self.removable(evidence, mask):
            mask = mask.without(min(candidates, key=score.__getitem__))
            yield mask
