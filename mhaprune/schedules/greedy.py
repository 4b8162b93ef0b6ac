"""Remove the head whose removal costs least now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mhaprune.heads import HeadMask
from mhaprune.schedules.base import Judge, Stepwise


@dataclass(frozen=True)
class Greedy(Stepwise):
    """Step by step that head goes without which the loss is least, measured together with all that are gone already
    (backward elimination, Marill & Green 1963). No scorer has a say."""

    @property
    def scoring(self) -> Literal["none"]:
        return "none"

    def path(self, judge: Judge) -> Iterator[HeadMask]:
        mask = HeadMask(judge.subject.grid)
        yield mask
        while candidates := [mask.without(head) for head in self.removable(judge, mask)]:
            mask = candidates[int(judge.loss(candidates).argmin())]
            yield mask
