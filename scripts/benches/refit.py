"""A refit in one flowing pass, beside a whole pass for each sublayer."""

from __future__ import annotations

import copy

import torch

from benches.sides import DEFAULT, VOCABULARY_SIZE, Pair
from mhaprune.attention.gates import Softmax
from mhaprune.heads import HeadMask
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sort import Sort
from mhaprune.recoveries.refitting import correct, ridges, show
from mhaprune.recoveries.refitting import refit as refit_all


def refit(config: Transformer = DEFAULT, num_examples: int = 1024) -> list[Pair]:
    """Refit of the default model without half its heads, all sublayers in one pass, against one whole pass for each
    sublayer. What the dense model shows is there already for both."""
    dense = Seq2Seq(config, VOCABULARY_SIZE, Softmax())
    shown = show(dense, Sort(train=num_examples).splits().train)
    left = dense.without(HeadMask(dense.grid, frozenset(head for head in dense.grid if head.head % 2)))

    @torch.no_grad()
    def pass_by_pass() -> Seq2Seq:
        model = copy.deepcopy(left)
        for i, wanted in enumerate(shown.streams):
            each = list(model.last_maps(shown.batches))[i]
            parts = [(inputs, stream - after) for (inputs, after), stream in zip(each.parts, wanted, strict=True)]
            tokens = sum(len(inputs) for inputs, _ in parts)
            correct(each.weight, each.bias, parts, ridges(1e-3, tokens, each.weight.shape[1]))
        return model

    return [("refit", lambda: refit_all(left, shown, 1e-3), pass_by_pass)]
