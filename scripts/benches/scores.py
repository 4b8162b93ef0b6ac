"""Scores that need fewer evaluations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benches.sides import VOCABULARY_SIZE, Pair, Row
from mhaprune.command_line import described
from mhaprune.measure import measure
from mhaprune.model.gates import Softmax
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.racing import Racing
from mhaprune.scorers.shapley import Shapley
from mhaprune.tasks.sort import Sort


def shapley() -> list[Pair]:
    """Shapley values of the default model's heads at equal evaluations of the split, against captum's
    ShapleyValueSampling. Needs the extra `bench`."""
    from captum.attr import ShapleyValueSampling

    model, examples = Seq2Seq(Transformer(), VOCABULARY_SIZE, Softmax()), Sort().splits().score[:128]
    rounds, num_heads = 8, len(model.grid)

    def value(gates: Tensor) -> Tensor:
        return -measure(model, examples, gates[0]).loss.mean()[None]

    peer = ShapleyValueSampling(value)
    # Captum runs the model once per head and permutation, and once with all heads closed.
    evaluations = 1 + rounds * num_heads
    ours = Shapley(evaluations=evaluations)
    opened, closed = torch.ones(1, num_heads), torch.zeros(1, num_heads)
    return [
        (
            f"shapley {evaluations} evaluations",
            lambda: ours(model, examples, 0),
            lambda: peer.attribute(opened, closed, n_samples=rounds),
        )
    ]


def racing() -> list[Row]:
    """Not a time but a share: what racing takes of the example passes of full ablation, and in how many models of
    `sort`, one per seed, both remove the same heads."""
    rows: list[Row] = []
    studies = [described("task=sort", "experiment=train", f"seed={seed}").study() for seed in range(10)]
    for removed in (6, 12):
        same, shares = [], []
        for study in studies:
            full = Ablation()(study.subject, study.splits.score, study.seed)
            race = Racing(keep=len(study.subject.grid) - removed)(study.subject, study.splits.score, study.seed)
            lowest = [set(scores.values[0].argsort(stable=True)[:removed].tolist()) for scores in (full, race)]
            same.append(lowest[0] == lowest[1])
            shares.append(race.forward_passes / full.forward_passes)
        quartiles = np.quantile(shares, [0.25, 0.5, 0.75, 1.0])
        rows.append(
            {"name": f"racing, {removed} of {len(study.subject.grid)} removed", "models": len(same), "same": sum(same)}
            | dict(zip(("q1", "ratio", "q3", "largest"), quartiles, strict=True))
        )
    return rows
