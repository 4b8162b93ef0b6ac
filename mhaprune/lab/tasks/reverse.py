"""Reverse the sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

from mhaprune.lab.tasks.base import SequenceTask


@dataclass(frozen=True)
class Reverse(SequenceTask):
    """3 1 2 -> 2 1 3."""

    def transform(self, source: Sequence[int]) -> Sequence[int]:
        return source[::-1]

    def aligned(self, source: Sequence[int], target: Sequence[int]) -> list[list[int]]:
        return [[i] for i in reversed(range(len(self.vocabulary.decode(source))))]
