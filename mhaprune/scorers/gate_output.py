"""What the gate lets through."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mhaprune.data import Examples
from mhaprune.measure import BATCH_SIZE
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class GateOutput(Scorer):
    """g_n · mean over tokens of ‖c_n O_n‖₂: the learned gate made identifiable by the size of what it scales.

    A model without gates lets everything through: g_n = 1. The mean is one ratio over the whole split, so long examples
    count by their tokens; its standard error is that of a ratio over examples (Cochran 1977, section 2.11).
    """

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores:
        weights = subject.output_weights()
        sums, counts = [], []
        for batch in examples.batches(BATCH_SIZE):
            batch_sums, batch_counts = [], []
            for block, (context_BHTK, valid_BT) in subject.head_outputs(batch).items():
                norms_BHT = (context_BHTK @ weights[block]).norm(dim=-1)
                batch_sums.append((norms_BHT * valid_BT[:, None]).sum(dim=-1))
                batch_counts.append(valid_BT.sum(dim=1, keepdim=True).expand(-1, norms_BHT.shape[1]))
            sums.append(torch.cat(batch_sums, dim=1))
            counts.append(torch.cat(batch_counts, dim=1))
        sums_EN, counts_EN = torch.cat(sums).double(), torch.cat(counts).double()
        mean_N = sums_EN.sum(0) / counts_EN.sum(0)
        residuals_EN = sums_EN - mean_N * counts_EN
        stderr_N = residuals_EN.std(dim=0) * len(examples) ** 0.5 / counts_EN.sum(0)
        gates_N = subject.learned_gates()
        scale_N = torch.ones_like(mean_N) if gates_N is None else gates_N.double()
        return Scores((scale_N * mean_N)[None], (scale_N * stderr_N)[None], forward_passes=1)
