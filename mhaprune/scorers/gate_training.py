"""The base of scorers that train gates.

Dimensions: B = batch, N = all heads of the subject.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import Diverged
from mhaprune.progress import track
from mhaprune.scorers.base import Budgeted, Scores
from mhaprune.settings.ranges import Ge, Gt
from mhaprune.subject import Subject

FIRST_MULTIPLIER = 1e-3
"""The first value of the multiplier of a penalty."""


@dataclass(frozen=True)
class TrainedGates(Budgeted):
    """A scorer that trains one gate per head with Adam. Its scores are kept in the cache.

    As a scorer it trains the gates of a frozen model; `recoveries.fine_tune_gates` trains them together with the
    weights.
    """

    family: ClassVar[str] = "trained"
    draws_by_head: ClassVar[bool] = True
    zero_if_silent: ClassVar[bool] = False
    start: ClassVar[float] = 0.0
    """The first logit of every gate."""
    bound: ClassVar[float] = math.inf
    """The largest absolute logit."""

    steps: Annotated[int, Ge(1)] = 300
    """Number of optimiser steps."""
    batch_size: Annotated[int, Ge(1)] = 32
    """Number of examples per step."""
    learning_rate: Annotated[float, Gt(0)] = 0.1
    """The learning rate of Adam. It is constant."""

    @abstractmethod
    def sample(self, logits_N: Tensor, batch: int, share: float, draw: torch.Generator) -> Tensor:
        """Draw gates (B, N) in float64, one row per example. `share` is the finished share of the training, 0 to 1."""

    def penalty(self, logits_N: Tensor, share: float, multiplier: float) -> tuple[Tensor, float]:
        """Return a scalar to add to the loss, and the multiplier for the next step."""
        return logits_N.new_zeros(()), multiplier

    def scores(self, path: Tensor) -> Tensor:
        """Return the scores (N,) for the logits after every step, (steps, N)."""
        return path[-1]

    @torch.enable_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        self.heads_to_keep(len(subject.grid))
        training = GateTraining(self, len(subject.grid), self.steps, seed, subject.device)
        batches = examples.shuffled_batches(self.batch_size, torch.Generator().manual_seed(seed))
        examples_run = 0
        for step in track(range(self.steps), "gates"):
            batch = next(batches)
            gates_BN = training.sample(len(batch)).to(subject.dtype)
            loss = subject.evaluate(batch, gates_BN).loss.double().mean() + training.penalty()
            if not loss.isfinite():
                raise Diverged(
                    f"learning_rate={self.learning_rate}: the loss of the gates is {loss.item()} at step {step}"
                )
            (training.logits_N.grad,) = torch.autograd.grad(loss, training.logits_N)
            training.descend()
            examples_run += len(batch)
        passes = examples_run / len(examples)
        return Scores(training.scores()[None], None, passes, passes)


class GateTraining:
    """The gates of a model in training, one logit per head.

    Each step calls `sample`, `penalty` and `descend`, once and in this order.
    """

    def __init__(self, gates: TrainedGates, heads: int, steps: int, seed: int, device: torch.device) -> None:
        self.kind, self.steps, self.multiplier = gates, steps, FIRST_MULTIPLIER
        self.logits_N = torch.full((heads,), gates.start, dtype=torch.double, device=device, requires_grad=True)
        self._adam = torch.optim.Adam([self.logits_N], lr=gates.learning_rate)
        self._draw = torch.Generator().manual_seed(seed)
        self._path: list[Tensor] = []

    @property
    def share(self) -> float:
        """The finished share of the training, from 0 in the first step to 1 in the last."""
        return len(self._path) / max(1, self.steps - 1)

    def sample(self, batch: int) -> Tensor:
        """Draw gates (B, N) in float64."""
        return self.kind.sample(self.logits_N, batch, self.share, self._draw)

    def penalty(self) -> Tensor:
        """Return the penalty of this step, a scalar."""
        penalty, self.multiplier = self.kind.penalty(self.logits_N, self.share, self.multiplier)
        return penalty

    def descend(self) -> None:
        """Take a step down the gradient of the logits, and forget the gradient; do nothing if there is none."""
        if self.logits_N.grad is None:
            return
        self._adam.step()
        self.logits_N.grad = None
        self.logits_N.data.clamp_(-self.kind.bound, self.kind.bound)
        self._path.append(self.logits_N.detach().clone())

    def scores(self) -> Tensor:
        """Return the scores of the heads after the last step, (N,)."""
        return self.kind.scores(torch.stack(self._path))

    def state(self) -> dict[str, Any]:
        """Return all that a training needs to go on from here, as plain values and tensors."""
        return {
            "logits": self.logits_N.detach().clone(),
            "adam": self._adam.state_dict(),
            "draw": self._draw.get_state(),
            "multiplier": self.multiplier,
            "path": list(self._path),
            "gradient": self.logits_N.grad,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state` returned."""
        self.logits_N.data.copy_(state["logits"])
        self._adam.load_state_dict(state["adam"])
        self._draw.set_state(state["draw"])
        self.multiplier, self._path, self.logits_N.grad = state["multiplier"], list(state["path"]), state["gradient"]
