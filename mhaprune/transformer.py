"""An encoder-decoder transformer (Vaswani et al. 2017) with layer normalisation before each sublayer (pre-LN).

Dimensions: B = batch, S = source, T = target, U = keys, D = d_model, H = heads of a block, K = head_dim, N = all heads,
V = vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from mhaprune.attention import Projection, padding_bias
from mhaprune.data import EOS, PAD, Examples, shift_right
from mhaprune.decoding import KVCache, decode_greedily
from mhaprune.gates import Gate
from mhaprune.heads import Block, HeadGrid, HeadMask, Site
from mhaprune.layers import AttentionSublayer, Call, DecoderLayer, EncoderLayer, FeedForward, sinusoids
from mhaprune.prefixes import Branches, depth_first
from mhaprune.relevance import with_relevance
from mhaprune.subject import AttentionMap, Fallback, Gates, Outcome
from mhaprune.surgery import remove_heads

TOKENS_AT_ONCE = 2048
"""Tokens that one step of a pass of many masks takes: enough to be worth the call, few enough to stay near the
processor."""
WAITING_BYTES = 2**28
"""Of the states that such a pass keeps for later, layer by layer; masks that need more go in several passes."""


@dataclass(frozen=True)
class Transformer:
    """The shape of a model; called with the size of a vocabulary it makes one with fresh weights.

    That has `num_heads` heads in each block or those of another `grid`, of the same size each. `max_length` is the
    longest source or target in tokens, end of sequence included. `tie_output` shares the matrix that embeds the target
    with the one that predicts it (Press & Wolf 2017).
    """

    d_model: int = 64
    num_heads: int = 4
    num_encoder_layers: int = 2
    num_decoder_layers: int = 2
    dim_feedforward: int = 128
    dropout: float = 0.0
    tie_output: bool = True
    max_length: int = 64

    def __post_init__(self) -> None:
        for name in ("d_model", "num_heads", "num_decoder_layers", "dim_feedforward", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if self.num_encoder_layers < 0:
            raise ValueError(f"num_encoder_layers={self.num_encoder_layers}: must be 0 or more")
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model}: must be even, sines and cosines share it")
        if self.d_model % self.num_heads:
            allowed = ", ".join(str(h) for h in range(1, self.d_model + 1) if self.d_model % h == 0)
            raise ValueError(f"num_heads={self.num_heads}: must divide d_model={self.d_model}, so one of {allowed}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")

    @property
    def blocks(self) -> tuple[Block, ...]:
        layers = {
            Site.ENCODER_SELF: self.num_encoder_layers,
            Site.DECODER_SELF: self.num_decoder_layers,
            Site.CROSS: self.num_decoder_layers,
        }
        return tuple(Block(site, layer) for site, count in layers.items() for layer in range(count))

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    def __call__(self, vocabulary_size: int, gate: Gate | None = None, grid: HeadGrid | None = None) -> Seq2Seq:
        return Seq2Seq(self, vocabulary_size, gate, grid)


class Seq2Seq(nn.Module):
    """A `Subject`: see `subject.py` for what its methods promise. In evaluation mode unless it is being trained."""

    positions: Tensor
    encoder: Sequence[EncoderLayer]
    decoder: Sequence[DecoderLayer]

    def __init__(
        self, config: Transformer, vocabulary_size: int, gate: Gate | None = None, grid: HeadGrid | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.grid = HeadGrid.full(config.blocks, config.num_heads) if grid is None else grid
        self.source_embedding = nn.Embedding(vocabulary_size, config.d_model)
        self.target_embedding = nn.Embedding(vocabulary_size, config.d_model)
        self.register_buffer("positions", sinusoids(config.max_length, config.d_model))
        heads = dict(zip(self.grid.blocks, self.grid.sizes, strict=True))

        def attention(site: Site, layer: int) -> AttentionSublayer:
            block = Block(site, layer)
            return AttentionSublayer(block, config.d_model, heads[block], config.head_dim, config.dropout, gate)

        def feed_forward() -> FeedForward:
            return FeedForward(config.d_model, config.dim_feedforward, config.dropout)

        encoder = nn.ModuleList(
            EncoderLayer(attention(Site.ENCODER_SELF, layer), feed_forward())
            for layer in range(config.num_encoder_layers)
        )
        decoder = nn.ModuleList(
            DecoderLayer(attention(Site.DECODER_SELF, layer), attention(Site.CROSS, layer), feed_forward())
            for layer in range(config.num_decoder_layers)
        )
        self.encoder, self.decoder = cast("Sequence[EncoderLayer]", encoder), cast("Sequence[DecoderLayer]", decoder)
        self.encoder_norm = nn.LayerNorm(config.d_model)
        self.decoder_norm = nn.LayerNorm(config.d_model)
        self.output = Projection(config.d_model, vocabulary_size)
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=config.d_model**-0.5)
        if config.tie_output:
            self.output.weight = self.target_embedding.weight
        self.eval()

    def forward(
        self, source_BS: Tensor, prefix_BT: Tensor, gates: Gates | None = None, fallback: Fallback | None = None
    ) -> Tensor:
        """Logits (B, T, V) of what follows each position of `prefix_BT`, which starts with BOS."""
        return self._run(source_BS, prefix_BT, self._call(gates, fallback))

    def logits(self, batch: Examples, gates: Gates | None = None, fallback: Fallback | None = None) -> Tensor:
        return self(batch.source, shift_right(batch.target), gates, fallback)

    def evaluate(self, batch: Examples, gates: Gates | None = None, fallback: Fallback | None = None) -> Outcome:
        return Outcome.of(self.logits(batch, gates, fallback), batch.target)

    @torch.no_grad()
    def evaluate_masks(self, batch: Examples, gates: Tensor, fallback: Fallback | None = None) -> Outcome:
        length = max(batch.source.shape[1], batch.target.shape[1])
        state_bytes = len(batch) * length * self.config.d_model * self.positions.element_size()
        parts = gates.split(max(1, WAITING_BYTES // state_bytes))
        outcomes = [self._evaluate_part(batch, gates_MN, fallback, len(batch) * length) for gates_MN in parts]
        return Outcome(*(torch.cat(values) for values in zip(*outcomes, strict=True)))

    def queries(self, batch: Examples) -> dict[Block, Tensor]:
        tokens = dict.fromkeys(Site, batch.target) | {Site.ENCODER_SELF: batch.source}
        return {block: tokens[block.site] != PAD for block in self.grid.blocks}

    def head_outputs(self, batch: Examples) -> dict[Block, Tensor]:
        contexts: dict[Block, Tensor] = {}
        self._run(batch.source, shift_right(batch.target), Call(contexts=contexts))
        # In the order of the grid: a pass meets self-attention and cross-attention of the decoder in turn.
        return {block: contexts[block] for block in self.grid.blocks}

    def attention_maps(self, batch: Examples) -> dict[Block, AttentionMap]:
        weights: dict[Block, Tensor] = {}
        self._run(batch.source, shift_right(batch.target), Call(weights=weights))
        # What the decoder reads at a position is BOS or the token before: never end of sequence, unless it is padding.
        source_BS, target_BT = (batch.source != PAD) & (batch.source != EOS), batch.target != PAD
        queries = dict.fromkeys(Site, target_BT) | {Site.ENCODER_SELF: source_BS}
        keys = dict.fromkeys(Site, source_BS) | {Site.DECODER_SELF: target_BT}
        return {b: AttentionMap(weights[b], queries[b.site], keys[b.site]) for b in self.grid.blocks}

    def output_weights(self) -> dict[Block, Tensor]:
        return {
            block: sublayer.attention.out_proj.weight.mT.unflatten(0, (-1, self.config.head_dim))
            for block, sublayer in self.attention_sublayers().items()
        }

    def value_weights(self) -> dict[Block, Tensor]:
        return {
            block: sublayer.attention.v_proj.weight.unflatten(0, (-1, self.config.head_dim))
            for block, sublayer in self.attention_sublayers().items()
        }

    def learned_gates(self) -> Tensor | None:
        gates = [sublayer.attention.gate for sublayer in self.attention_sublayers().values()]
        learned = [gate() for gate in gates if gate is not None]
        return torch.cat(learned) if learned else None

    @torch.no_grad()
    def without(self, mask: HeadMask) -> Self:
        # What a deep copy takes instead of copying: the smaller layers, and what is immutable.
        copies: dict[int, object] = {id(self.grid): self.grid.without(mask.removed), id(self.config): self.config}
        for block, sublayer in self.attention_sublayers().items():
            heads = [head for head in self.grid if head.block == block]
            kept = [position for position, head in enumerate(heads) if head not in mask.removed]
            copies[id(sublayer.attention)] = remove_heads(sublayer.attention, kept)
        return copy.deepcopy(self, copies)

    def in_double(self) -> Self:
        return copy.deepcopy(self).double()

    def with_relevance(self, epsilon: float) -> Self:
        return with_relevance(self, epsilon)

    def encode(self, source_BS: Tensor) -> Tensor:
        """What the decoder reads, (B, S, D)."""
        return self._encode(source_BS, padding_bias(source_BS == PAD, self.positions.dtype), Call())

    def predict(self, batch: Examples) -> Tensor:
        return self.decode_greedily(batch.source, batch.target.shape[1])

    @torch.no_grad()
    def decode_greedily(
        self,
        source_BS: Tensor,
        max_tokens: int,
        gates: Tensor | None = None,
        *,
        stop: bool = False,
        use_cache: bool = True,
    ) -> Tensor:
        """What `decoding.decode_greedily` promises. `use_cache` keeps the keys and values of the positions so far;
        without it the whole prefix is run again for every token, with the same result."""
        call = self._call(gates, None)
        bias = padding_bias(source_BS == PAD, self.positions.dtype)
        readers = [layer.cross.attention.num_heads > 0 for layer in self.decoder]
        memory: list[tuple[Tensor, Tensor] | None] = [None] * len(readers)
        if any(readers):  # else nobody is interested in what the encoder says
            memory_BSD = self._encode(source_BS, bias, call)
            pairs = zip(self.decoder, readers, strict=True)
            memory = [layer.cross.project(memory_BSD) if reads else None for layer, reads in pairs]
        caches = [KVCache(max_tokens) if use_cache else None for _ in self.decoder]

        def next_logits(tokens_BT: Tensor) -> Tensor:
            first = tokens_BT.shape[1] - 1 if use_cache else 0
            x_BTD = self._embed(self.target_embedding, tokens_BT[:, first:], first)
            for layer, keys_values, cache in zip(self.decoder, memory, caches, strict=True):
                x_BTD = layer(x_BTD, keys_values, bias, call, cache)
            return self.output(self.decoder_norm(x_BTD[:, -1]))

        return decode_greedily(next_logits, source_BS, max_tokens, stop=stop)

    def attention_sublayers(self) -> dict[Block, AttentionSublayer]:
        """Every attention block by its name, in the order of the grid."""
        sublayers = [layer.self_attention for layer in self.encoder]
        sublayers += [layer.self_attention for layer in self.decoder]
        sublayers += [layer.cross for layer in self.decoder]
        return {sublayer.block: sublayer for sublayer in sublayers}

    def count_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def count_flops(self, batch: Examples) -> int:
        S, T, D = batch.source.shape[1], batch.target.shape[1], self.config.d_model
        lengths = {Site.ENCODER_SELF: (S, S), Site.DECODER_SELF: (T, T), Site.CROSS: (T, S)}
        multiply_adds = T * D * self.output.out_features
        for block, heads in zip(self.grid.blocks, self.grid.sizes, strict=True):
            queries, keys = lengths[block.site]
            width = heads * self.config.head_dim
            multiply_adds += width * (2 * D * (queries + keys) + 2 * queries * keys)
        feed_forward = 2 * D * self.config.dim_feedforward
        multiply_adds += feed_forward * (len(self.encoder) * S + len(self.decoder) * T)
        return 2 * len(batch) * multiply_adds

    def _call(self, gates: Gates | None, fallback: Fallback | None) -> Call:
        if isinstance(gates, Tensor):
            gates = self.grid.split(gates)
        return Call(gates or {}, fallback or {})

    def _run(self, source_BS: Tensor, prefix_BT: Tensor, call: Call) -> Tensor:
        bias = padding_bias(source_BS == PAD, self.positions.dtype)
        memory_BSD = self._encode(source_BS, bias, call)
        x_BTD = self._embed(self.target_embedding, prefix_BT)
        for layer in self.decoder:
            x_BTD = layer(x_BTD, layer.cross.project(memory_BSD), bias, call)
        return self.output(self.decoder_norm(x_BTD))

    def _evaluate_part(self, batch: Examples, gates_MN: Tensor, fallback: Fallback | None, tokens: int) -> Outcome:
        outcomes = Outcome(*(self.positions.new_empty(len(gates_MN), len(batch)) for _ in Outcome._fields))
        root = Branches.root(self._embed(self.source_embedding, batch.source), len(gates_MN))
        steps = self._steps(batch, gates_MN, fallback or {})
        for end in depth_first(root, steps, max(1, TOKENS_AT_ONCE // tokens)):
            parts = Outcome.of(end.states, batch.target.expand(len(end.states), -1, -1))
            for values_MB, part_PB in zip(outcomes, parts, strict=True):
                values_MB[end.masks] = part_PB[end.rows]
        return outcomes

    def _steps(self, batch: Examples, gates_MN: Tensor, fallback: Fallback) -> list[Callable[[Branches], Branches]]:
        """`_run` under many masks, step by step."""
        gates = {block: gates_MH.double().cpu().numpy() for block, gates_MH in self.grid.split(gates_MN).items()}
        bias = padding_bias(batch.source == PAD, self.positions.dtype)

        def attend(sublayer: AttentionSublayer, **how: Any) -> Callable[[Branches], Branches]:
            return lambda x: x.attend(sublayer, gates[sublayer.block], fallback.get(sublayer.block), **how)

        def apply(function: Callable[[Tensor], Tensor]) -> Callable[[Branches], Branches]:
            return lambda x: x.apply(function)

        def begin_to_decode(x: Branches) -> Branches:
            start = self._embed(self.target_embedding, shift_right(batch.target))
            return x.remember([layer.cross for layer in self.decoder], start)

        steps = []
        for encoder_layer in self.encoder:
            steps += [attend(encoder_layer.self_attention, bias=bias), apply(encoder_layer.feed_forward)]
        steps += [apply(self.encoder_norm), begin_to_decode]
        for layer in self.decoder:
            steps += [attend(layer.self_attention, is_causal=True), attend(layer.cross, bias=bias)]
            steps += [apply(layer.feed_forward)]
        return [*steps, apply(self.decoder_norm), apply(self.output)]

    def _encode(self, source_BS: Tensor, bias: Tensor, call: Call) -> Tensor:
        x_BSD = self._embed(self.source_embedding, source_BS)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, bias, call)
        return self.encoder_norm(x_BSD)

    def _embed(self, embedding: nn.Embedding, ids_BT: Tensor, first: int = 0) -> Tensor:
        last = first + ids_BT.shape[1]
        if last > len(self.positions):
            raise ValueError(
                f"max_length={len(self.positions)}: the model has no position for a sequence of {last} tokens"
            )
        return embedding(ids_BT) * math.sqrt(self.config.d_model) + self.positions[first:last]
