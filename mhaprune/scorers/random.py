"""A random order of the heads: the control that every other method must beat."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from mhaprune.data import Data
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.settings.ranges import Ge
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Random(Scorer):
    """Heads in random order (the control of Budhraja et al. 2020)."""

    family: ClassVar[str] = "control"
    reads_examples: ClassVar[bool] = False
    draws_by_head: ClassVar[bool] = True
    zero_if_silent: ClassVar[bool] = False

    draws: Annotated[int, Ge(1)] = 10
    """Number of random orders."""

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        draw = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(len(subject.grid), generator=draw) for _ in range(self.draws)]
        return Scores(torch.stack(orders).double())
