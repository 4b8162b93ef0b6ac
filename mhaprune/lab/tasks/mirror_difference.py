"""Subtract from each symbol its mirror image, modulo the number of symbols."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from mhaprune.lab.tasks.base import ALPHABET, SequenceTask
from mhaprune.settings.ranges import Within


@dataclass(frozen=True)
class MirrorDifference(SequenceTask):
    """3 1 2 -> 1 0 9, for ten symbols: t_i = (s_i − s_{n−1−i}) mod num_symbols.

    It exists because every symbol of the target needs two symbols of the source at once, in order: a − b is not b − a.
    A head that attends to both places returns the mean of their values. From this mean alone the order of the two
    symbols cannot be told. An earlier layer must first mark the half of the source that each symbol is from. (The
    second half of the target is the first half backwards and negated, so the model can read it off the first half.)
    """

    num_symbols: Annotated[int, Within(2, len(ALPHABET))] = 7
    """Number of different symbols. There are fewer than in other toy tasks, as the differences must be learnt by heart.
    """
    max_length: Annotated[int, Within(1, 4096)] = 6
    """Number of symbols of the longest sequences. They are shorter than in other toy tasks, because the task is harder.
    """

    def transform(self, source: Sequence[int]) -> Sequence[int]:
        pairs = zip(source, reversed(source), strict=True)
        return [(symbol - mirrored) % self.num_symbols for symbol, mirrored in pairs]
