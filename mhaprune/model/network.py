"""The network: its sizes, and what it computes from embeddings to logits, for any grid of heads.

The source of this file is hashed into the cache key of trained models, so a change here trains every model again. It
therefore holds only what training runs. How a trained network is observed, pruned and decoded is in `transformer.py`,
which is not part of the key.

Dimensions: B = batch, S = source, T = target, D = d_model, N = all heads, V = vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, cast

import torch
from torch import Tensor, nn

from mhaprune.data import PAD, Examples, shift_right
from mhaprune.heads import Block, HeadGrid, Site
from mhaprune.model.attention import Projection, padding_bias
from mhaprune.model.gates import GateConfig
from mhaprune.model.layers import (
    AttentionSublayer,
    Call,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    project_memory,
    sinusoids,
)
from mhaprune.settings.ranges import Checked, Ge, Lt, Within
from mhaprune.subject import AnswerOutcome, Fallback, Gates


@dataclass(frozen=True)
class Transformer(Checked):
    """The sizes of an encoder-decoder transformer."""

    d_model: Annotated[int, Within(2, 2**16)] = 64
    """Width of embeddings and hidden states; even, and a multiple of `num_heads` unless `head_dim` is set."""
    num_heads: Annotated[int, Ge(1)] = 4
    """Heads in each attention block."""
    head_dim: Annotated[int | None, Ge(1)] = None
    """Width of one head. None shares `d_model` among the heads, so that their number changes no number of weights."""
    num_encoder_layers: Annotated[int, Within(0, 1000)] = 2
    """Encoder layers, each with one attention block; may be 0."""
    num_decoder_layers: Annotated[int, Within(1, 1000)] = 2
    """Decoder layers, each with two attention blocks: self-attention and cross-attention."""
    dim_feedforward: Annotated[int, Ge(1)] = 128
    """Hidden width of the feed-forward part of a layer."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability of dropping attention weights, hidden feed-forward values and sublayer outputs in training."""
    tie_output: bool = True
    """Whether one matrix embeds the target and predicts it (Press & Wolf 2017)."""
    max_length: Annotated[int, Ge(1)] = 64
    """Longest source or target in tokens, with the end of sequence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model}: must be even, sines and cosines share it")
        if self.head_dim is None and self.d_model % self.num_heads:
            allowed = ", ".join(str(h) for h in range(1, self.d_model + 1) if self.d_model % h == 0)
            raise ValueError(f"num_heads={self.num_heads}: must divide d_model={self.d_model}, so one of {allowed}")

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The attention blocks, in the order of the grid."""
        layers = {
            Site.ENCODER_SELF: self.num_encoder_layers,
            Site.DECODER_SELF: self.num_decoder_layers,
            Site.CROSS: self.num_decoder_layers,
        }
        return tuple(Block(site, layer) for site, count in layers.items() for layer in range(count))

    def bytes_to_train(self, vocabulary_size: int) -> int:
        """An estimate of the memory for weights, gradients and both moments of the optimiser, in float32."""
        layers = self.num_encoder_layers + 2 * self.num_decoder_layers
        feed_forwards = self.num_encoder_layers + self.num_decoder_layers
        weights = (
            4 * layers * self.d_model * self.num_heads * self.width_per_head
            + 2 * feed_forwards * self.d_model * self.dim_feedforward
        )
        weights += 3 * vocabulary_size * self.d_model
        return 16 * weights + 4 * self.max_length * self.d_model

    @property
    def width_per_head(self) -> int:
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim


class EncoderDecoder(nn.Module):
    """An encoder-decoder transformer (Vaswani et al. 2017) with layer normalisation before each sublayer (pre-LN).

    It has the heads of `grid`, by default `num_heads` in each block; `gate` makes a learned gate for each block, None
    makes none. A new network is in evaluation mode.
    """

    config: Transformer
    positions: Tensor
    encoder: Sequence[EncoderLayer]
    decoder: Sequence[DecoderLayer]

    def __init__(
        self, config: Transformer, vocabulary_size: int, gate: GateConfig | None = None, grid: HeadGrid | None = None
    ) -> None:
        super().__init__()
        grid = HeadGrid.full(config.blocks, config.num_heads) if grid is None else grid
        d_model, dropout = config.d_model, config.dropout
        self.config, self.grid, self.head_dim = config, grid, config.width_per_head
        self.source_embedding = nn.Embedding(vocabulary_size, d_model)
        self.target_embedding = nn.Embedding(vocabulary_size, d_model)
        self.register_buffer("positions", sinusoids(config.max_length, d_model))
        heads = dict(zip(grid.blocks, grid.sizes, strict=True))

        def attention(site: Site, layer: int) -> AttentionSublayer:
            block = Block(site, layer)
            return AttentionSublayer(block, d_model, heads[block], config.width_per_head, dropout, gate)

        def feed_forward() -> FeedForward:
            return FeedForward(d_model, config.dim_feedforward, dropout)

        encoder = nn.ModuleList(
            EncoderLayer(attention(Site.ENCODER_SELF, layer), feed_forward())
            for layer in range(config.num_encoder_layers)
        )
        decoder = nn.ModuleList(
            DecoderLayer(attention(Site.DECODER_SELF, layer), attention(Site.CROSS, layer), feed_forward())
            for layer in range(config.num_decoder_layers)
        )
        self.encoder, self.decoder = cast("Sequence[EncoderLayer]", encoder), cast("Sequence[DecoderLayer]", decoder)
        self.encoder_norm = nn.LayerNorm(d_model)
        self.decoder_norm = nn.LayerNorm(d_model)
        self.output = Projection(d_model, vocabulary_size)
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=d_model**-0.5)
        self.tie()
        self.eval()

    def tie(self) -> None:
        """Use one matrix to embed the target and to predict it, if the config says so."""
        if self.config.tie_output:
            self.output.weight = self.target_embedding.weight

    def forward(
        self, source_BS: Tensor, prefix_BT: Tensor, gates: Gates | None = None, fallback: Fallback | None = None
    ) -> Tensor:
        """Logits (B, T, V) of what follows each position of `prefix_BT`, which starts with BOS."""
        return self.run(source_BS, prefix_BT, self.call(gates, fallback))

    def logits(self, batch: Examples, gates: Gates | None = None, fallback: Fallback | None = None) -> Tensor:
        return self(batch.source, shift_right(batch.target), gates, fallback)

    def evaluate(self, batch: Examples, gates: Gates | None = None, fallback: Fallback | None = None) -> AnswerOutcome:
        return AnswerOutcome.of(self.logits(batch, gates, fallback), batch.target)

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @property
    def dtype(self) -> torch.dtype:
        return self.positions.dtype

    def learned_gates(self) -> Tensor | None:
        gates = [sublayer.attention.gate for sublayer in self.attention_sublayers().values()]
        learned = [gate() for gate in gates if gate is not None]
        return torch.cat(learned) if learned else None

    def attention_sublayers(self) -> dict[Block, AttentionSublayer]:
        """Every attention block by its name, in the order of the grid."""
        sublayers = [layer.self_attention for layer in self.encoder]
        sublayers += [layer.self_attention for layer in self.decoder]
        sublayers += [layer.cross for layer in self.decoder]
        return {sublayer.block: sublayer for sublayer in sublayers}

    def call(self, gates: Gates | None = None, fallback: Fallback | None = None) -> Call:
        """Return gates and fallback as a `Call`."""
        if isinstance(gates, Tensor):
            gates = self.grid.split(gates)
        return Call(gates or {}, fallback or {})

    def run(self, source_BS: Tensor, prefix_BT: Tensor, call: Call) -> Tensor:
        """Compute the logits, and fill the records of `call`."""
        bias = self.bias(source_BS)
        memories = self.project_memory(self.encode(source_BS, call, bias))
        x_BTD = self.embed(self.target_embedding, prefix_BT)
        for layer, memory in zip(self.decoder, memories, strict=True):
            x_BTD = layer(x_BTD, memory, bias, call)
        return self.output(self.decoder_norm(x_BTD))

    def encode(self, source_BS: Tensor, call: Call | None = None, bias: Tensor | None = None) -> Tensor:
        """Return the output of the encoder, (B, S, D). `bias` is that of the source, if it is known already."""
        call, bias = call or Call(), self.bias(source_BS) if bias is None else bias
        x_BSD = self.embed(self.source_embedding, source_BS)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, bias, call)
        return self.encoder_norm(x_BSD)

    def project_memory(self, memory_BSD: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """The keys and values that the cross-attention of each decoder layer finds in the output of the encoder."""
        return project_memory(memory_BSD, [layer.cross for layer in self.decoder])

    def bias(self, source_BS: Tensor) -> Tensor:
        """(B, 1, 1, S): a term that keeps attention off the padding of the source."""
        return padding_bias(source_BS == PAD, self.positions.dtype)

    def embed(self, embedding: nn.Embedding, ids_BT: Tensor, first: int = 0) -> Tensor:
        """Tokens at the positions from `first` on, (B, T, D); raises ValueError beyond the last position."""
        last = first + ids_BT.shape[1]
        if last > len(self.positions):
            raise ValueError(
                f"max_length={len(self.positions)}: the model has no position for a sequence of {last} tokens"
            )
        return torch.add(self.positions[first:last], embedding(ids_BT), alpha=math.sqrt(self.config.d_model))
