"""Score: one trained order of the heads for all sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import all_open
from mhaprune.settings.ranges import Ge
from mhaprune.subject import Batch, Subject
from mhaprune_literature.gate_training import Cooled, TrainedGates

HALVINGS = 60
"""The halvings by which a threshold is found: enough for float64."""


@dataclass(frozen=True)
class Mattr(Cooled, TrainedGates):
    """The logit of the head after a training for all sizes at once (MAttr, arXiv 2609.25518).

    In each step, every example keeps a number k of heads of its own, drawn from 1 to N - 1. The gates are
    σ((a - t) / τ), with the threshold t for which they add up to k. A head that is not open outputs what it does on the
    corrupt counterpart. What is made small is |ℓ - ℓ₀|, where ℓ₀ is the loss with all heads.

    The paper compares outputs. Here losses are compared, since every subject shows its own; and the temperature τ falls
    log-linearly, as that of `subset` does.
    """

    draws_by_head: ClassVar[bool] = False

    steps: Annotated[int, Ge(1)] = 500
    """Number of optimiser steps."""
    replace: Literal["corrupt", "zero"] = "corrupt"
    """What a head that is not open outputs: what it does on the corrupt counterpart, or zeros."""

    @property
    def reads_pairs(self) -> bool:
        return self.replace == "corrupt"

    @property
    def passes(self) -> int:
        return 2 + self.reads_pairs

    def beside(self, examples: Data) -> Sequence[Data]:
        return [examples.counterpart()] if self.reads_pairs else []

    def sample(self, logits_N: Tensor, batch: int, share: float, draw: torch.Generator) -> Tensor:
        k_B = torch.randint(1, max(2, len(logits_N)), (batch,), generator=draw).to(logits_N.device)
        return gates_of_sum(logits_N.expand(batch, -1), k_B, self.temperature(share))

    def objective(self, subject: Subject, batch: Batch, gates_BN: Tensor, *others: Batch) -> Tensor:
        with torch.no_grad():
            whole_B = subject.evaluate(batch, all_open(subject, len(batch))).loss
            fallback = subject.head_outputs(others[0]) if others else None
        loss_B: Tensor = subject.evaluate(batch, gates_BN, fallback).loss
        return (loss_B - whole_B).abs()


def gates_of_sum(logits_BN: Tensor, sum_B: Tensor, temperature: float) -> Tensor:
    """Return gates (B, N), σ((a - t) / temperature), with the threshold t of each row for which they have this sum. Its
    derivative is that of the equation which defines it. The logits must be of float64."""
    if not logits_BN.numel():
        return logits_BN
    with torch.no_grad():
        low_B1 = logits_BN.amin(dim=1, keepdim=True) - 50 * temperature
        high_B1 = logits_BN.amax(dim=1, keepdim=True) + 50 * temperature
        for _ in range(HALVINGS):
            middle_B1 = (low_B1 + high_B1) / 2
            above = ((logits_BN - middle_B1) / temperature).sigmoid().sum(dim=1) > sum_B
            low_B1, high_B1 = middle_B1.where(above[:, None], low_B1), high_B1.where(above[:, None], middle_B1)
        gates_BN = ((logits_BN - low_B1) / temperature).sigmoid()
        slopes_BN = gates_BN * (1 - gates_BN)
        parts_BN = slopes_BN / slopes_BN.sum(dim=1, keepdim=True).clamp(min=1e-300)
    moves_B1 = ((logits_BN - logits_BN.detach()) * parts_BN).sum(dim=1, keepdim=True)
    return ((logits_BN - low_B1 - moves_B1) / temperature).sigmoid()
