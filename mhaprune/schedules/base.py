"""What every way of choosing promises, and what a budget means.

Dimensions: N = all heads of the subject.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mhaprune.heads import HeadMask
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Schedule(ABC):
    """A way to choose which heads go."""

    @abstractmethod
    def __call__(self, subject: Subject, score: Callable[[Subject], Tensor], budgets: Sequence[int]) -> list[HeadMask]:
        """One mask per budget, each with exactly that many heads removed. `score` gives (N,) for any subject."""


def check_budgets(budgets: Sequence[int | float]) -> None:
    """Raise ValueError unless every budget is a fraction from 0.0 to 1.0 or a whole number of heads."""
    for budget in budgets:
        if not 0 <= budget <= (1 if isinstance(budget, float) else math.inf):
            raise ValueError(f"budgets={budget}: a fraction must be from 0.0 to 1.0, a number of heads 0 or more")


def heads_to_remove(budgets: Sequence[int | float], num_heads: int) -> list[int]:
    """Budgets as numbers of heads, ascending, none twice, 0 always among them.

    A fraction becomes the nearest whole number of heads. Raises ValueError for more heads than there are.
    """
    check_budgets(budgets)
    counts = {round(budget * num_heads) if isinstance(budget, float) else budget for budget in budgets}
    if max(counts, default=0) > num_heads:
        raise ValueError(
            f"experiment.budgets={max(counts)}: the model has {num_heads} heads, allowed are 0 to {num_heads}"
        )
    return sorted(counts | {0})
