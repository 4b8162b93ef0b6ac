"""Score once, remove the lowest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mhaprune.heads import HeadMask
from mhaprune.schedules.base import Schedule
from mhaprune.subject import Subject


@dataclass(frozen=True)
class OneShot(Schedule):
    """The k heads of lowest score over the whole model go, of equals the first (Michel et al. 2019, section 4)."""

    def __call__(self, subject: Subject, score: Callable[[Subject], Tensor], budgets: Sequence[int]) -> list[HeadMask]:
        order = torch.argsort(score(subject), stable=True).tolist()
        heads = subject.grid.heads
        return [HeadMask(subject.grid, frozenset(heads[n] for n in order[:budget])) for budget in budgets]
