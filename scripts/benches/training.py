"""Training steps, beside those of torch.nn.Transformer and of another how."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benches.sides import VOCABULARY_SIZE, Pair, random_examples
from mhaprune.attention.gates import Softmax
from mhaprune.lab.cli.command_line import described
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.layers import sinusoids
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.training import Training
from mhaprune.lab.sources.trained import TrainedSource
from mhaprune.lab.tasks.sequences import PAD, Examples, shift_right


def training() -> list[Pair]:
    """A training step of ours, gates included, against the same step of torch.nn.Transformer; AdamW and clipping
    alike."""
    config, batch, how = Transformer(), random_examples(64, 10), Training(optimiser="adamw")
    ours = Seq2Seq(config, VOCABULARY_SIZE, Softmax())
    peer = TorchSeq2Seq(config)
    ours_optimisers = how.optimisers(ours, Softmax())
    peer_optimiser = torch.optim.AdamW(peer.parameters(), lr=how.learning_rate, fused=True)

    def ours_step() -> None:
        ours.train()
        with torch.enable_grad():
            how.step(ours, batch, ours_optimisers)

    def peer_step() -> None:
        peer.train()
        with torch.enable_grad():
            loss = F.cross_entropy(peer.call(batch).flatten(0, 1), batch.target.flatten(), ignore_index=PAD)
            peer_optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            peer_optimiser.step()

    return [("training", ours_step, peer_step)]


def recipes(count: int = 16) -> list[Pair]:
    """As many training steps by the default how of a task as by the one before it: AdamW, batches as drawn."""

    def steps(*overrides: str) -> Callable[[], None]:
        source = described("experiment=train", *overrides).source
        assert isinstance(source, TrainedSource)
        how, train = source.training, source.task.splits().train
        model = Seq2Seq(source.model, len(source.task.vocabulary), source.gate).train()
        optimisers = how.optimisers(model, source.gate)
        batches = train.shuffled_batches(how.batch_size, torch.Generator().manual_seed(0), how.sorted_batches)

        def call() -> None:
            with torch.enable_grad():
                for batch in islice(batches, count):
                    how.step(model, batch, optimisers)

        return call

    pairs: list[Pair] = []
    for task, before in (("sort", "adamw"), ("inflection", "adamw_inflection")):
        pairs.append((f"how of {task}", steps(f"task={task}"), steps(f"task={task}", f"training={before}")))
    return pairs


class TorchSeq2Seq(nn.Module):
    """The peer of `Seq2Seq`: the same shape around `torch.nn.Transformer`, pre-LN and batch first."""

    positions: Tensor

    def __init__(self, config: Transformer) -> None:
        super().__init__()
        self.config = config
        self.source_embedding = nn.Embedding(VOCABULARY_SIZE, config.d_model)
        self.target_embedding = nn.Embedding(VOCABULARY_SIZE, config.d_model)
        self.register_buffer("positions", sinusoids(config.max_length, config.d_model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that pre-LN has no nested-tensor path
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
        self.output = nn.Linear(config.d_model, VOCABULARY_SIZE)
        self.output.weight = self.target_embedding.weight

    def call(self, batch: Examples) -> Tensor:
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
