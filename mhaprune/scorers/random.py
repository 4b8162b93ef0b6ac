"""The control that every other method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mhaprune.data import Examples
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Random(Scorer):
    """A random order of the heads, `draws` times (the control of Budhraja et al. 2020)."""

    family: ClassVar[str] = "control"
    reads_examples: ClassVar[bool] = False

    draws: int = 10

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ValueError(f"draws={self.draws}: must be 1 or more")

    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores:
        draw = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(len(subject.grid), generator=draw) for _ in range(self.draws)]
        return Scores(torch.stack(orders).double())
