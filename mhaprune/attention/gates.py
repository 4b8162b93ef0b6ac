"""Learnable gates: one weight per head of a block, trained together with the model.

Dimensions: H = heads of one block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from mhaprune.settings.ranges import Checked, Ge


class HeadGate(nn.Module, ABC):
    """The learned gates of one block, as a module. A call without arguments returns the gates, (H,)."""

    @abstractmethod
    def forward(self) -> Tensor: ...

    @abstractmethod
    def penalty(self) -> Tensor | None:
        """Return a scalar that training adds to the loss, or None."""


@dataclass(frozen=True)
class GateConfig(Checked, ABC):
    """The settings of the gates of a block. A call with a number of heads returns a `HeadGate`."""

    learning_rate: Annotated[float, Ge(0)] = 0.1
    """Learning rate of the gates alone. At the learning rate of the weights, gates hardly move, because scaling the
    slice of W_O that reads a head has the same effect as scaling its gate."""

    @abstractmethod
    def __call__(self, num_heads: int) -> HeadGate: ...


@dataclass(frozen=True)
class Softmax(GateConfig):
    """Softmax over the heads of a block, as in the exercise of d2l.ai's section on multi-head attention.

    With logits a it is g = H·softmax(a) or, with `scale=one`, g = softmax(a).
    """

    scale: Literal["heads", "one"] = "heads"
    """The sum of the gates: `heads` is H, so an untrained gate changes nothing; `one` is 1, as in the exercise."""
    init: Literal["zeros", "rand"] = "zeros"
    """`zeros` starts all heads equal; `rand` is the exercise's `torch.rand`, whose order largely survives training."""
    entropy_weight: Annotated[float, Ge(0)] = 0.0
    """Weight of the entropy of softmax(a) in the loss. A positive weight favours few open heads; 0 adds nothing."""

    def __call__(self, num_heads: int) -> SoftmaxGate:
        return SoftmaxGate(num_heads, self)


class SoftmaxGate(HeadGate):
    """g = H·softmax(logits), or softmax(logits) with `scale=one`."""

    def __init__(self, num_heads: int, config: Softmax) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # so that the weights of a model do not depend on its gates
            initial = torch.zeros(num_heads) if config.init == "zeros" else torch.rand(num_heads)
        self.logits = nn.Parameter(initial)
        self.factor = num_heads if config.scale == "heads" else 1
        self.entropy_weight = config.entropy_weight

    def forward(self) -> Tensor:
        return self.factor * self.logits.softmax(dim=0)

    def penalty(self) -> Tensor | None:
        if self.entropy_weight == 0:
            return None
        log_share = self.logits.log_softmax(dim=0)
        return -self.entropy_weight * (log_share.exp() * log_share).sum()
