"""What every scorer promises.

Dimensions: N = all heads of the subject, R = draws.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mhaprune.data import Examples
from mhaprune.subject import Subject

TokenValues = Sequence[tuple[Tensor, Tensor]]
"""For each block of the grid what its heads give for every token, (B, H, T), and which tokens count, (B, T)."""


@dataclass(frozen=True)
class Scores:
    """Importance of every head, higher = more important, and what it cost.

    `values` is (R, N); R is 1 for all methods but those that draw at random. `stderr`, (R, N), is the standard error
    where a score is a mean, over examples unless the scorer says otherwise. Passes are over the whole split.
    """

    values: Tensor
    stderr: Tensor | None = None
    forward_passes: float = 0.0
    backward_passes: float = 0.0

    @classmethod
    def mean_over_examples(cls, values_EN: Tensor, forward_passes: float, backward_passes: float = 0.0) -> Scores:
        """The mean of what every example says, with its standard error."""
        if len(values_EN) < 2:
            raise ValueError(f"score split of {len(values_EN)}: a standard error needs 2 or more examples")
        values_EN = values_EN.double()
        stderr_N = values_EN.std(dim=0) / len(values_EN) ** 0.5
        return cls(values_EN.mean(dim=0)[None], stderr_N[None], forward_passes, backward_passes)

    @classmethod
    def mean_over_tokens(cls, batches: Iterable[TokenValues], forward_passes: float) -> Scores:
        """The mean over all tokens of a split of what every head gives for each.

        It is one ratio over the whole split, so long examples count by their tokens; its standard error is that of a
        ratio over examples (Cochran 1977, section 2.11).
        """
        sums, counts = [], []
        for blocks in batches:
            sums.append(
                torch.cat([(values.double() * counted[:, None]).sum(dim=2) for values, counted in blocks], dim=1)
            )
            tokens = [counted.sum(dim=1, keepdim=True).expand(-1, values.shape[1]) for values, counted in blocks]
            counts.append(torch.cat(tokens, dim=1).double())
        sums_EN, counts_EN = torch.cat(sums), torch.cat(counts)
        mean_N = sums_EN.sum(dim=0) / counts_EN.sum(dim=0)
        residuals_EN = sums_EN - mean_N * counts_EN
        stderr_N = residuals_EN.std(dim=0) * len(sums_EN) ** 0.5 / counts_EN.sum(dim=0)
        return cls(mean_N[None], stderr_N[None], forward_passes)


@dataclass(frozen=True)
class Scorer(ABC):
    """A way to score heads. It sees the model through the `Subject` protocol only, and only the *score* split."""

    family: ClassVar[str]
    """What the score is made from; figures put the scorers of one family together."""

    trains: ClassVar[bool] = False
    """Whether its scores are the outcome of a training, which is kept in the cache like any other."""

    @property
    def needs_gates(self) -> bool:
        """Whether a model without learned gates is refused."""
        return False

    @abstractmethod
    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores: ...

    def check(self, num_heads: int) -> None:
        """Raise ValueError, before anything is trained, for settings that do not fit so many heads."""
        return

    def keeping(self, heads: int) -> Scorer:
        """The scorer to ask when that many heads are to be kept: this one, where all heads are ranked once."""
        return self


def heads_to_keep(keep: int | float, num_heads: int) -> int:
    """A number of heads, or a share of them from 0.0 to 1.0; raises ValueError for more heads than there are."""
    heads = round(keep * num_heads) if isinstance(keep, float) else keep
    if not 0 <= heads <= num_heads:
        raise ValueError(f"keep={keep}: the model has {num_heads} heads, allowed are 0 to {num_heads}")
    return heads


def check_keep(keep: int | float) -> None:
    """Raise ValueError unless `keep` is a share from 0.0 to 1.0 or a whole number of heads."""
    if keep < 0 or (isinstance(keep, float) and not keep <= 1):
        raise ValueError(f"keep={keep}: a share must be from 0.0 to 1.0, a number of heads 0 or more")


def check_training(steps: int, batch_size: int, learning_rate: float) -> None:
    """Raise ValueError for what no gates can be trained with."""
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be 1 or more")
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate={learning_rate}: must be above 0 and finite")
