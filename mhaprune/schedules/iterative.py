"""Score, remove a few, score what is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mhaprune.heads import HeadMask
from mhaprune.schedules.base import Judge, Stepwise


@dataclass(frozen=True)
class Iterative(Stepwise):
    """The `every` heads of lowest score go, then the model without them is scored anew (Molchanov et al. 2017, figure
    1): heads that stand in for each other are not all taken for idle."""

    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise ValueError(f"every={self.every}: must be 1 or more heads between two scorings")

    def asks(self) -> Literal["again"]:
        return "again"

    def path(self, judge: Judge) -> Iterator[HeadMask]:
        mask = HeadMask(judge.subject.grid)
        yield mask
        while self.removable(judge, mask):
            left = judge.subject.without(mask) if mask.removed else judge.subject
            score = dict(zip(mask.kept, judge.score(left).tolist(), strict=True))
            for _ in range(self.every):
                if candidates := self.removable(judge, mask):
                    mask = mask.without(min(candidates, key=score.__getitem__))
                    yield mask
