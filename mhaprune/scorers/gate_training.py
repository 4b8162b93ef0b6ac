"""The base of scorers that train gates on a frozen model.

Dimensions: B = batch, N = all heads of the subject.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import Diverged
from mhaprune.progress import track
from mhaprune.scorers.base import Budgeted
from mhaprune.settings.ranges import Ge, Gt
from mhaprune.subject import Subject

Sample = Callable[[Tensor, int, float, torch.Generator], Tensor]
"""A function that draws gates (B, N), one row per example. Its arguments are the logits (N,), the batch size B, the
finished share of the training (0 to 1), and a random generator."""

Penalty = Callable[[Tensor, float], Tensor]
"""A function that returns a scalar to add to the loss. Its arguments are the logits (N,) and the finished share of the
training (0 to 1)."""


@dataclass(frozen=True)
class TrainedGates(Budgeted):
    """A scorer that trains one gate per head with Adam on the frozen model. Its scores are kept in the cache."""

    family: ClassVar[str] = "trained"
    draws_by_head: ClassVar[bool] = True
    zero_if_silent: ClassVar[bool] = False

    steps: Annotated[int, Ge(1)] = 300
    """Number of optimiser steps."""
    batch_size: Annotated[int, Ge(1)] = 32
    """Number of examples per step."""
    learning_rate: Annotated[float, Gt(0)] = 0.1
    """The learning rate of Adam. It is constant."""

    def train(
        self,
        subject: Subject,
        examples: Data,
        seed: int,
        initial: Tensor,
        sample: Sample,
        penalty: Penalty | None = None,
        bound: float = math.inf,
    ) -> tuple[Tensor, float]:
        """Train the logits of the gates, clamped to ± `bound`, on the mean loss under sampled gates. Return the logits
        after every optimiser step, (steps, N) in float64, and the number of passes over all examples.

        Raises `Diverged` where the loss is not finite.
        """
        logits_N = initial.double().to(subject.device).requires_grad_()
        optimiser = torch.optim.Adam([logits_N], lr=self.learning_rate)
        draw = torch.Generator().manual_seed(seed)
        batches = examples.shuffled_batches(self.batch_size, torch.Generator().manual_seed(seed))
        path, examples_run = [], 0
        for step in track(range(self.steps), "gates"):
            share = step / max(1, self.steps - 1)
            batch = next(batches)
            gates_BN = sample(logits_N, len(batch), share, draw)
            loss = subject.evaluate(batch, gates_BN.to(subject.dtype)).loss.double().mean()
            if penalty is not None:
                loss = loss + penalty(logits_N, share)
            if not loss.isfinite():
                raise Diverged(
                    f"learning_rate={self.learning_rate}: the loss of the gates is {loss.item()} at step {step}"
                )
            (logits_N.grad,) = torch.autograd.grad(loss, logits_N)
            optimiser.step()
            logits_N.data.clamp_(-bound, bound)
            path.append(logits_N.detach().clone())
            examples_run += len(batch)
        return torch.stack(path), examples_run / len(examples)
