"""Train one gate per head on a frozen model.

Dimensions: B = batch, N = all heads.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import Diverged
from mhaprune.progress import track
from mhaprune.subject import Subject

Sample = Callable[[Tensor, int, float, torch.Generator], Tensor]
"""Gates (B, N) drawn from logits (N,) for a batch of B at a share of the training between 0 and 1."""

Penalty = Callable[[Tensor, float], Tensor]
"""What is added to the loss for logits (N,) at a share of the training between 0 and 1."""


class GatePath(NamedTuple):
    """The logits after every step, (steps, N) in float64, and how many examples the steps took in all."""

    logits: Tensor
    examples_run: int


def train_gates(
    subject: Subject,
    examples: Data,
    initial: Tensor,
    sample: Sample,
    penalty: Penalty | None = None,
    *,
    bound: float = math.inf,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> GatePath:
    """`steps` of Adam on the mean loss under sampled gates; logits stay within ± `bound`, the model as it is.

    Raises `Diverged` where the loss is not finite.
    """
    device, dtype = subject.device, subject.dtype
    logits_N = initial.double().to(device).requires_grad_()
    optimiser = torch.optim.Adam([logits_N], lr=learning_rate)
    draw = torch.Generator().manual_seed(seed)
    batches = examples.shuffled_batches(batch_size, torch.Generator().manual_seed(seed))
    path, examples_run = [], 0
    for step in track(range(steps), "gates"):
        share = step / max(1, steps - 1)
        batch = next(batches)
        gates_BN = sample(logits_N, len(batch), share, draw)
        loss = subject.evaluate(batch, gates_BN.to(dtype)).loss.double().mean()
        if penalty is not None:
            loss = loss + penalty(logits_N, share)
        if not loss.isfinite():
            raise Diverged(f"learning_rate={learning_rate}: the loss of the gates is {loss.item()} at step {step}")
        (logits_N.grad,) = torch.autograd.grad(loss, logits_N)
        optimiser.step()
        logits_N.data.clamp_(-bound, bound)
        path.append(logits_N.detach().clone())
        examples_run += len(batch)
    return GatePath(torch.stack(path), examples_run)
