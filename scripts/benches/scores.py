"""Scores that need fewer evaluations."""

from __future__ import annotations

import torch
from torch import Tensor

from benches.sides import VOCABULARY_SIZE, Pair
from mhaprune.attention.gates import Softmax
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sort import Sort
from mhaprune.measure.outcomes import measure


def shapley() -> list[Pair]:
    """Shapley values of the default model's heads at equal evaluations of the split, against captum's
    ShapleyValueSampling. Needs the extra `bench`, and the plug-in of examples/literature."""
    from captum.attr import ShapleyValueSampling

    from mhaprune_literature.shapley import Shapley

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
