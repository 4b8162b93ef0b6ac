"""Passes and decoding: of pruned models, and with keys and values kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benches.sides import VOCABULARY_SIZE, Pair, random_examples
from mhaprune.attention.gates import Softmax
from mhaprune.heads import HeadMask
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.decoding import decode_greedily
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.measure.times import COPIES, taking_turns


def removal() -> list[Pair]:
    """Half the heads removed, against a model built with half and against the dense one; forward and decoding."""
    pairs: list[Pair] = []
    for d_model, length, batch_size in ((64, 10, 64), (256, 128, 8)):
        config = Transformer(d_model=d_model, dim_feedforward=2 * d_model, max_length=length)
        gated = Seq2Seq(config, VOCABULARY_SIZE, Softmax())
        half = HeadMask(gated.grid, frozenset(head for head in gated.grid if head.head % 2))
        removed = [gated.without(half) for _ in range(COPIES)]
        peers = {
            "built": [Seq2Seq(config, VOCABULARY_SIZE, grid=removed[0].grid) for _ in range(COPIES)],
            "dense": [gated.without(HeadMask(gated.grid)) for _ in range(COPIES)],
        }
        batch = random_examples(batch_size, length)
        for what in ("logits", "predict"):
            pairs += [
                (f"removal {what} d_model={d_model} length={length} / {peer}", each(removed, what, batch), call)
                for peer, call in ((peer, each(models, what, batch)) for peer, models in peers.items())
            ]
    return pairs


def decode(length: int = 64) -> list[Pair]:
    """Greedy decoding of as many tokens as the source has, with keys and values kept or with the prefix run again."""
    pairs: list[Pair] = []
    for d_model, batch_size in ((64, 32), (256, 1), (64, 1)):
        batch = random_examples(batch_size, length)
        model = Seq2Seq(Transformer(d_model=d_model, dim_feedforward=2 * d_model), VOCABULARY_SIZE)
        ours, peer = (partial(call, batch.source, length) for call in (model.decode_greedily, partial(plainly, model)))
        pairs.append((f"decode d_model={d_model} batch_size={batch_size}", ours, peer))
    return pairs


@torch.no_grad()
def plainly(model: Seq2Seq, source: Tensor, length: int) -> Tensor:
    """Decode greedily with the whole prefix run again for every token."""
    bias = model.bias(source)
    memories = model.project_memory(model.encode(source, bias))

    def next_logits(tokens: Tensor) -> Tensor:
        x = model.embed(model.target_embedding, tokens)
        for layer, memory in zip(model.decoder, memories, strict=True):
            x = layer(x, memory, bias)
        return model.output(model.decoder_norm(x[:, -1]))

    return decode_greedily(next_logits, source, length)


def each(models: list[Seq2Seq], method: str, batch: Examples) -> Callable[[], object]:
    """Call a method of one model after the other."""
    return taking_turns([partial(getattr(model, method), batch) for model in models])
