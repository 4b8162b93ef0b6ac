"""Write the running sum of the sequence, modulo the number of symbols."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mhaprune.lab.tasks.base import SequenceTask


@dataclass(frozen=True)
class RunningSum(SequenceTask):
    """3 9 2 -> 3 2 4, for ten symbols."""

    def transform(self, source: Sequence[int]) -> Sequence[int]:
        return [total % self.num_symbols for total in accumulate(source)]
