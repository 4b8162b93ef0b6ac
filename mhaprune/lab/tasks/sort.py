"""Sort the sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

from mhaprune.lab.tasks.base import SequenceTask
from mhaprune.lab.tasks.sequences import SPECIAL


@dataclass(frozen=True)
class Sort(SequenceTask):
    """3 1 2 -> 1 2 3."""

    def transform(self, source: Sequence[int]) -> Sequence[int]:
        return sorted(source)

    def aligned(self, source: Sequence[int], target: Sequence[int]) -> list[list[int]]:
        """Return all positions of a symbol, because equal symbols cannot be told apart."""
        return [
            [i for i, read in enumerate(source) if read == written] for written in target if written >= len(SPECIAL)
        ]
