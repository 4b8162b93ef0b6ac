"""What every scorer promises.

Dimensions: N = all heads of the subject, R = draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mhaprune.data import Examples
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Scores:
    """Importance of every head, higher = more important, and what it cost.

    `values` is (R, N); R is 1 for all methods but those that draw at random. `stderr`, (R, N), is the standard error
    over examples where a score is a mean over examples. `forward_passes` counts passes over the whole split.
    """

    values: Tensor
    stderr: Tensor | None = None
    forward_passes: int = 0


@dataclass(frozen=True)
class Scorer(ABC):
    """A way to score heads. It sees the model through the `Subject` protocol only, and only the *score* split."""

    needs_gates: ClassVar[bool] = False
    """Whether a model without learned gates is refused."""

    @abstractmethod
    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores: ...
