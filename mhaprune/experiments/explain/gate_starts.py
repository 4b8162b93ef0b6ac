"""Where softmax gates go from other starts, the weights behind them held still.

Dimensions: B = batch, N = all heads.
"""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.scorers.gate_training import train_gates
from mhaprune.scorers.scoring import head_columns
from mhaprune.subject import Subject

CLOSED = 1e-6
"""A smaller gate counts as this size, so that training can open it again."""


def from_other_starts(
    subject: Subject, examples: Data, starts: int, steps: int, seed: int, learning_rate: float = 0.1
) -> pd.DataFrame:
    """One row per start and head: the gate at the start, after `steps` of Adam at the end, and the model's own.

    Logits start from a standard normal distribution; a block's gates keep their sum.

    Raises ValueError for a model without learned gates.
    """
    own_N = subject.learned_gates()
    if own_N is None:
        raise ValueError("gate=none: a model without gates has none to start elsewhere")
    own_N = own_N.detach().clamp(min=CLOSED)

    def gates(logits_N: Tensor) -> Tensor:
        blocks = zip(subject.grid.split(logits_N).values(), subject.grid.split(own_N).values(), strict=True)
        return torch.cat([own_H.sum() * logits_H.softmax(dim=0) for logits_H, own_H in blocks])

    def sample(logits_N: Tensor, batch: int, share: float, draw: torch.Generator) -> Tensor:
        # The model multiplies by its own gate as well.
        return (gates(logits_N) / own_N).expand(batch, -1)

    draw, parts = torch.Generator().manual_seed(seed), []
    for start in range(starts):
        initial_N = torch.randn(len(subject.grid), generator=draw).to(own_N.device)
        path = train_gates(
            subject, examples, initial_N, sample, steps=steps, batch_size=64, learning_rate=learning_rate, seed=seed
        )
        parts.append(
            pd.DataFrame(
                {
                    "start": start,
                    **pd.DataFrame(map(head_columns, subject.grid)),
                    "gate_start": gates(initial_N.double()).tolist(),
                    "gate_end": gates(path.logits[-1]).tolist(),
                    "gate_own": own_N.tolist(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)
