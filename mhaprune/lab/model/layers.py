"""The layers of the small transformer, and what they compute from tokens to logits, for any grid of heads.

Dimensions: B = batch, S = source, T = target, U = keys, D = d_model, H = heads of a block, K = head_dim, V =
vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mhaprune.attention.gates import GateConfig
from mhaprune.attention.layer import MultiHeadAttention, Projection, padding_bias, project_together
from mhaprune.heads import BlockId, HeadGrid
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.sites import NeuronSite, Site
from mhaprune.lab.tasks.sequences import PAD


class Deferred(nn.Module):
    """A module that runs the function it is called with. A pass that replays the outputs of modules can so skip the
    function."""

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class AttentionSublayer(nn.Module):
    """x + attention(norm(x)). Keys and values are made from x itself, unless `keys_values` are given.

    A block without heads adds the bias of W_O and computes nothing else.
    """

    def __init__(
        self, block: BlockId, d_model: int, num_heads: int, head_dim: int, dropout: float, gate: GateConfig | None
    ) -> None:
        super().__init__()
        self.block = block
        self.norm = nn.LayerNorm(d_model)
        self.attention = MultiHeadAttention(d_model, num_heads, head_dim=head_dim, dropout=dropout, gate=gate)
        self.dropout = nn.Dropout(dropout)
        self.before_output = Deferred()

    def forward(
        self,
        x_BTD: Tensor,
        keys_values: tuple[Tensor, Tensor] | None = None,
        bias: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        attention = self.attention
        if attention.num_heads == 0:
            merged_BTD = attention.out_proj(x_BTD[..., :0])
        else:
            attend = partial(self.attend, x_BTD, keys_values, bias, is_causal=is_causal)
            merged_BTD = attention.merge(self.before_output(attend))
        return x_BTD + (self.dropout(merged_BTD) if self.training else merged_BTD)

    def attend(
        self,
        x_BTD: Tensor,
        keys_values: tuple[Tensor, Tensor] | None = None,
        bias: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the output of every head before gate and W_O, (B, H, T, K). The block must have heads."""
        attention, h_BTD = self.attention, self.norm(x_BTD)
        if keys_values is None:
            queries, keys, values = attention.project(h_BTD, h_BTD, h_BTD)
        else:
            queries, (keys, values) = attention.split(attention.q_proj(h_BTD)), keys_values
        return attention.attend(queries, keys, values, bias, is_causal=is_causal)[0]


def project_memory(memory_BSD: Tensor, readers: Sequence[AttentionSublayer]) -> list[tuple[Tensor, Tensor] | None]:
    """Return the keys and values that each cross-attention makes from the output of the encoder, all computed in one
    product.

    For a block without heads, return None.
    """
    attentions = [reader.attention for reader in readers]
    projections = [each for a in attentions if a.num_heads for each in (a.k_proj, a.v_proj)]
    parts = iter(project_together(memory_BSD, projections) if projections else ())
    return [(a.split(next(parts)), a.split(next(parts))) if a.num_heads else None for a in attentions]


class FeedForward(nn.Sequential):
    """x + W_2 relu(W_1 norm(x))."""

    def __init__(self, d_model: int, dim_feedforward: int, dropout: float) -> None:
        super().__init__(
            nn.LayerNorm(d_model),
            Projection(d_model, dim_feedforward),
            nn.ReLU(),
            nn.Dropout(dropout),
            Projection(dim_feedforward, d_model),
            nn.Dropout(dropout),
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden = x_BTD
        for module in self:
            if self.training or not isinstance(module, nn.Dropout):  # a call that does nothing takes its time, too
                hidden = module(hidden)
        return x_BTD + hidden


class EncoderLayer(nn.Module):
    """Self-attention over the source, then feed-forward."""

    def __init__(self, self_attention: AttentionSublayer, feed_forward: FeedForward) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.feed_forward = feed_forward

    def forward(self, x_BSD: Tensor, bias: Tensor) -> Tensor:
        return self.feed_forward(self.self_attention(x_BSD, bias=bias))


class DecoderLayer(nn.Module):
    """Causal self-attention over the target, cross-attention to the encoder's output, then feed-forward."""

    def __init__(self, self_attention: AttentionSublayer, cross: AttentionSublayer, feed_forward: FeedForward) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.cross = cross
        self.feed_forward = feed_forward

    def forward(self, x_BTD: Tensor, memory: tuple[Tensor, Tensor] | None, bias: Tensor) -> Tensor:
        """Return the states after the layer. `memory` holds the keys and values that the cross-attention makes from the
        encoder's output; None if the cross-attention has no heads."""
        # No padding mask is needed here: targets are padded on the right, and a causal mask hides everything to the
        # right.
        x_BTD = self.self_attention(x_BTD, is_causal=True)
        return self.feed_forward(self.cross(x_BTD, memory, bias))


def sinusoids(length: int, d_model: int) -> Tensor:
    """Return the encodings of the positions t, (length, D): sin and cos of t / 10000^(2i/D), interleaved (Vaswani et
    al. 2017, section 3.5)."""
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, d_model, 2) / d_model)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class EncoderDecoder(nn.Module):
    """An encoder-decoder transformer (Vaswani et al. 2017) with layer normalisation before each sublayer (pre-LN).

    It has the units of `grid`, by default all of the config; `gate` makes a learned gate for each block, None
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
        grid = config.grid if grid is None else grid
        d_model, dropout = config.d_model, config.dropout
        self.config, self.head_dim = config, config.width_per_head
        self.source_embedding = nn.Embedding(vocabulary_size, d_model)
        self.target_embedding = nn.Embedding(vocabulary_size, d_model)
        self.register_buffer("positions", sinusoids(config.max_length, d_model))
        sizes = config.sizes | dict(zip(grid.blocks, grid.sizes, strict=True))

        def attention(site: Site, layer: int) -> AttentionSublayer:
            block = BlockId(site, layer)
            return AttentionSublayer(block, d_model, sizes[block], config.width_per_head, dropout, gate)

        def feed_forward(site: NeuronSite, layer: int) -> FeedForward:
            return FeedForward(d_model, sizes[BlockId(site, layer)], dropout)

        encoder = nn.ModuleList(
            EncoderLayer(attention(Site.ENCODER_SELF, layer), feed_forward(NeuronSite.ENCODER, layer))
            for layer in range(config.num_encoder_layers)
        )
        decoder = nn.ModuleList(
            DecoderLayer(
                attention(Site.DECODER_SELF, layer),
                attention(Site.CROSS, layer),
                feed_forward(NeuronSite.DECODER, layer),
            )
            for layer in range(config.num_decoder_layers)
        )
        self.encoder, self.decoder = cast("Sequence[EncoderLayer]", encoder), cast("Sequence[DecoderLayer]", decoder)
        self.memories = Deferred()
        self.encoder_norm = nn.LayerNorm(d_model)
        self.decoder_norm = nn.LayerNorm(d_model)
        self.output = Projection(d_model, vocabulary_size)
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=d_model**-0.5)
        if config.tie_output:
            self.output.weight = self.target_embedding.weight
        self.eval()

    def forward(self, source_BS: Tensor, prefix_BT: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each position of `prefix_BT`, which starts with BOS."""
        bias = self.bias(source_BS)
        memories = self.memories(partial(self.project_memory, self.encode(source_BS, bias)))
        x_BTD = self.embed(self.target_embedding, prefix_BT)
        for layer, memory in zip(self.decoder, memories, strict=True):
            x_BTD = layer(x_BTD, memory, bias)
        return self.output(self.decoder_norm(x_BTD))

    def attention_sublayers(self) -> dict[BlockId, AttentionSublayer]:
        """Every attention block by its name, in the order of the grid."""
        sublayers = [layer.self_attention for layer in self.encoder]
        sublayers += [layer.self_attention for layer in self.decoder]
        sublayers += [layer.cross for layer in self.decoder]
        return {sublayer.block: sublayer for sublayer in sublayers}

    def encode(self, source_BS: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output of the encoder, (B, S, D). `bias` is what the method `bias` returns for the source."""
        bias = self.bias(source_BS) if bias is None else bias
        x_BSD = self.embed(self.source_embedding, source_BS)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, bias)
        return self.encoder_norm(x_BSD)

    def project_memory(self, memory_BSD: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Return the keys and values that the cross-attention of each decoder layer makes from the encoder's output."""
        return project_memory(memory_BSD, [layer.cross for layer in self.decoder])

    def bias(self, source_BS: Tensor) -> Tensor:
        """Return a bias (B, 1, 1, S) that keeps attention off the padding of the source."""
        return padding_bias(source_BS == PAD, self.positions.dtype)

    def embed(self, embedding: nn.Embedding, ids_BT: Tensor, first: int = 0) -> Tensor:
        """Embed tokens at the positions from `first` on, (B, T, D). Raises ValueError beyond the last position."""
        last = first + ids_BT.shape[1]
        if last > len(self.positions):
            raise ValueError(
                f"max_length={len(self.positions)}: the model has no position for a sequence of {last} tokens"
            )
        return torch.add(self.positions[first:last], embedding(ids_BT), alpha=math.sqrt(self.config.d_model))
