"""Copy the sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

from mhaprune.lab.tasks.base import SequenceTask


@dataclass(frozen=True)
class Copy(SequenceTask):
    """3 1 2 -> 3 1 2."""

    def transform(self, source: Sequence[int]) -> Sequence[int]:
        return source
