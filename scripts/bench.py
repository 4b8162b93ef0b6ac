"""Two things side by side in one process: `python scripts/bench.py training removal --json`. Ratios, never promises of time."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhaprune.data import PAD, Examples
from mhaprune.gates import Softmax
from mhaprune.heads import HeadMask
from mhaprune.speed import in_turn, ratios
from mhaprune.training import Training, training_step
from mhaprune.transformer import Seq2Seq, Transformer, shift_right, sinusoids

VOCABULARY_SIZE = 13
Pair = tuple[str, Callable[[], object], Callable[[], object]]


class TorchSeq2Seq(nn.Module):
    """The peer of `Seq2Seq`: the same shape around `torch.nn.Transformer`, pre-LN and batch first."""

    def __init__(self, config: Transformer) -> None:
        super().__init__()
        self.config = config
        self.source_embedding = nn.Embedding(VOCABULARY_SIZE, config.d_model)
        self.target_embedding = nn.Embedding(VOCABULARY_SIZE, config.d_model)
        self.register_buffer("positions", sinusoids(config.max_length, config.d_model))
        self.transformer = nn.Transformer(
            config.d_model,
            config.num_heads,
            config.num_encoder_layers,
            config.num_decoder_layers,
            config.dim_feedforward,
            config.dropout,
            norm_first=True,
            batch_first=True,
        )
        self.transformer.encoder.enable_nested_tensor = False
        self.output = nn.Linear(config.d_model, VOCABULARY_SIZE)
        self.output.weight = self.target_embedding.weight

    def logits(self, batch: Examples) -> Tensor:
        source_BSD = self._embed(self.source_embedding, batch.source)
        target_BTD = self._embed(self.target_embedding, shift_right(batch.target))
        length, padding = batch.target.shape[1], batch.source == PAD
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        x_BTD = self.transformer(
            source_BSD,
            target_BTD,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.output(x_BTD)

    def _embed(self, embedding: nn.Embedding, ids_BT: Tensor) -> Tensor:
        return embedding(ids_BT) * math.sqrt(self.config.d_model) + self.positions[: ids_BT.shape[1]]


def training() -> list[Pair]:
    """A training step of ours, gates included, against the same step of torch.nn.Transformer; AdamW and clipping alike."""
    config, batch, recipe = Transformer(), random_examples(64, 10), Training()
    ours = config(VOCABULARY_SIZE, Softmax())
    peer = TorchSeq2Seq(config)
    ours_optimiser = recipe.optimiser(ours, Softmax())
    peer_optimiser = torch.optim.AdamW(peer.parameters(), lr=recipe.learning_rate, fused=True)

    def ours_step() -> None:
        ours.train()
        with torch.enable_grad():
            training_step(ours, batch, ours_optimiser)

    def peer_step() -> None:
        peer.train()
        with torch.enable_grad():
            loss = F.cross_entropy(peer.logits(batch).flatten(0, 1), batch.target.flatten(), ignore_index=PAD)
            peer_optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            peer_optimiser.step()

    return [("training", ours_step, peer_step)]


def removal() -> list[Pair]:
    """Half the heads removed against a model built with half of them, and against the dense one; forward and decoding."""
    pairs: list[Pair] = []
    for d_model, length, batch_size in ((64, 10, 64), (256, 128, 8)):
        config = Transformer(d_model=d_model, dim_feedforward=4 * d_model, max_length=length)
        dense = config(VOCABULARY_SIZE, Softmax())
        removed = dense.without(HeadMask(dense.grid, frozenset(head for head in dense.grid if head.head % 2)))
        built = built_with(config, removed)
        batch = random_examples(batch_size, length)
        name = f"removal d_model={d_model} length={length}"
        pairs += [
            (f"{name} forward / built", lambda m=removed, b=batch: m.logits(b), lambda m=built, b=batch: m.logits(b)),
            (f"{name} forward / dense", lambda m=removed, b=batch: m.logits(b), lambda m=dense, b=batch: m.logits(b)),
            (f"{name} decode / built", lambda m=removed, b=batch: m.predict(b), lambda m=built, b=batch: m.predict(b)),
            (f"{name} decode / dense", lambda m=removed, b=batch: m.predict(b), lambda m=dense, b=batch: m.predict(b)),
        ]
    return pairs


def built_with(config: Transformer, removed: Seq2Seq) -> Seq2Seq:
    """A fresh model whose blocks are *made* with as many heads as `removed` has left, no gates, nothing ever cut."""
    built = config(VOCABULARY_SIZE)
    for block, sublayer in built.attention_sublayers().items():
        cut = removed.attention_sublayers()[block].attention
        sublayer.attention = type(cut)(cut.embed_dim, cut.num_heads, head_dim=cut.head_dim)
    built.grid = removed.grid
    return built


def random_examples(batch_size: int, length: int) -> Examples:
    draw = torch.Generator().manual_seed(0)
    source, target = (torch.randint(3, VOCABULARY_SIZE, (batch_size, length), generator=draw) for _ in range(2))
    return Examples(source, target)


BENCHES = {bench.__name__: bench for bench in (training, removal)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[*BENCHES, []], metavar="NAME", help=f"one of {', '.join(BENCHES)}; default all"
    )
    parser.add_argument(
        "--pairs", type=int, default=40, help="how often each is run, in turn (at least 20; default 40)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.pairs < 20:
        parser.error(f"--pairs={arguments.pairs}: must be 20 or more")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for bench in arguments.names or BENCHES:
        for name, ours, peer in BENCHES[bench]():
            times = in_turn({"ours": ours, "peer": peer, "peer again": peer}, arguments.pairs)
            rows += [
                {"name": name, **ratios(times, "ours", "peer")},
                {"name": f"{name}, A/A", **ratios(times, "peer again", "peer")},
            ]
    table = pd.DataFrame(rows)
    print(table.to_json(orient="records", indent=2) if arguments.json else table.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
