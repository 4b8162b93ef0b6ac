"""The base of scorers that train gates.

Dimensions: B = batch, N = all heads of the subject.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import Diverged
from mhaprune.progress import track
from mhaprune.scorers.base import Budgeted, Scorer, Scores
from mhaprune.settings.ranges import Ge, Gt
from mhaprune.subject import Batch, Subject

FIRST_MULTIPLIER = 1e-3
"""The first value of the multiplier of a penalty."""


@dataclass(frozen=True)
class TrainedGates(Scorer):
    """A scorer that trains one gate per head of a frozen model with Adam."""

    family: ClassVar[str] = "trained"
    draws_by_head: ClassVar[bool] = True
    stored: ClassVar[bool] = True
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

    def objective(self, subject: Subject, batch: Batch, gates_BN: Tensor, *others: Batch) -> Tensor:
        """Return what is made small for each example, (B,). `others` are batches of the data that `beside` returns."""
        loss: Tensor = subject.evaluate(batch, gates_BN).loss
        return loss

    def beside(self, examples: Data) -> Sequence[Data]:
        """Return further data, each with an example for each of these."""
        return ()

    @property
    def passes(self) -> int:
        """The forward passes for each example of a step."""
        return 1

    @torch.enable_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        logits_N = torch.full((len(subject.grid),), self.start, dtype=torch.double, device=subject.device)
        adam = torch.optim.Adam([logits_N.requires_grad_()], lr=self.learning_rate)
        draw = torch.Generator().manual_seed(seed)
        drawn = [
            each.shuffled_batches(self.batch_size, torch.Generator().manual_seed(seed))
            for each in (examples, *self.beside(examples))
        ]
        path, multiplier, examples_run = list[Tensor](), FIRST_MULTIPLIER, 0
        for step in track(range(self.steps), "gates"):
            (batch, *others), share = map(next, drawn), step / max(1, self.steps - 1)
            gates_BN = self.sample(logits_N, len(batch), share, draw).to(subject.dtype)
            penalty, multiplier = self.penalty(logits_N, share, multiplier)
            loss = self.objective(subject, batch, gates_BN, *others).double().mean() + penalty
            if not loss.isfinite():
                raise Diverged(
                    f"learning_rate={self.learning_rate}: the loss of the gates is {loss.item()} at step {step}"
                )
            (logits_N.grad,) = torch.autograd.grad(loss, logits_N)
            adam.step()
            logits_N.data.clamp_(-self.bound, self.bound)
            path.append(logits_N.detach().clone())
            examples_run += len(batch)
        passes = examples_run / len(examples)
        return Scores(self.scores(torch.stack(path))[None], None, self.passes * passes, passes)


@dataclass(frozen=True)
class Cooled(Scorer):
    """A scorer whose gates come closer to 0 and 1 as a temperature falls, log-linearly."""

    start_temperature: Annotated[float, Gt(0)] = 1.0
    """The temperature at the first step."""
    end_temperature: Annotated[float, Gt(0)] = 0.1
    """The temperature at the last step. The lower it is, the closer the gates are to 0 and 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_temperature > self.start_temperature:
            raise ValueError(
                f"end_temperature={self.end_temperature}: must be at most start_temperature={self.start_temperature}"
            )

    def temperature(self, share: float) -> float:
        """Return the temperature when this share of the training is finished."""
        return float(self.start_temperature ** (1 - share) * self.end_temperature**share)


@dataclass(frozen=True)
class GatesOfSize(TrainedGates, Budgeted):
    """A scorer that trains gates for one number of heads that stay."""

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        self.heads_to_keep(len(subject.grid))
        return super().__call__(subject, examples, seed)
