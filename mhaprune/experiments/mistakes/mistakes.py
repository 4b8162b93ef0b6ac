"""The mistakes: scores that are made from the right gradients in a wrong way.

Dimensions: E = examples, N = heads, H = heads of one block, S = steps of a loop over batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.experiments.mistakes.words import RANDOM_GATES
from mhaprune.heads import HeadGrid
from mhaprune.measure import gate_gradients
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.taylor import Taylor
from mhaprune.subject import Subject

BATCH = 32
RIGHT = Taylor(level="example")
"""The right way: |derivative| of every example, then the mean (Michel et al. 2019, equation 2)."""


def per_batch(gradients_EN: Tensor, grid: HeadGrid) -> Tensor:
    return torch.stack([batch.mean(dim=0).abs() for batch in gradients_EN.split(BATCH)]).mean(dim=0)


def whole_split(gradients_EN: Tensor, grid: HeadGrid) -> Tensor:
    return gradients_EN.mean(dim=0).abs()


def not_zeroed(gradients_EN: Tensor, grid: HeadGrid) -> Tensor:
    sums_SN = torch.stack([batch.sum(dim=0) for batch in gradients_EN.split(BATCH)])
    return sums_SN.cumsum(dim=0).abs().sum(dim=0)


def not_zeroed_per_example(gradients_EN: Tensor, grid: HeadGrid) -> Tensor:
    return gradients_EN.cumsum(dim=0).abs().sum(dim=0)


def normalised_by_layer(gradients_EN: Tensor, grid: HeadGrid) -> Tensor:
    scores = grid.split(gradients_EN.abs().mean(dim=0))
    return torch.cat([scores_H / scores_H.norm() for scores_H in scores.values()])


@dataclass(frozen=True)
class WrongTaylor(Scorer):
    """A score made from ∂ℓ/∂ξ_n of every example, at open gates."""

    family: ClassVar[str] = "gradient"

    combine: Callable[[Tensor, HeadGrid], Tensor]
    """Makes scores (N,) of the derivatives (E, N)."""

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        scores_N = self.combine(gate_gradients(subject, examples), subject.grid)
        return Scores(scores_N[None], forward_passes=1, backward_passes=1)


WHAT = {
    per_batch.__name__: (
        f"The absolute value is taken of the gradient of the mean loss of a batch of {BATCH}, so gradients of examples"
        " that disagree cancel."
    ),
    whole_split.__name__: "The absolute value is taken of the gradient of the mean loss of the whole score split.",
    not_zeroed.__name__: (
        f"The gradient is not set to zero between batches of {BATCH}, so every step adds the absolute value of the sum"
        " so far."
    ),
    not_zeroed_per_example.__name__: "The gradient is not set to zero between examples, which come one by one.",
    normalised_by_layer.__name__: (
        "The right score is divided by its norm over the heads of a block, so every block has heads of equal weight."
    ),
    RANDOM_GATES: (
        "The learned gates, which rank the heads, start training at random values; the cost is how much farther they"
        " fall behind ablation."
    ),
}
"""What each mistake is, in a sentence."""

GRADIENT_MISTAKES = {
    combine.__name__: WrongTaylor(combine)
    for combine in (per_batch, whole_split, not_zeroed, not_zeroed_per_example, normalised_by_layer)
}
