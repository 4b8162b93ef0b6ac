"""The layers of a pre-LN transformer: each sublayer normalises its input, transforms it and adds the result.

Dimensions: B = batch, S = source, T = target, U = keys, D = d_model, H = heads of a block, K = head_dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mhaprune.heads import Block
from mhaprune.model.attention import MultiHeadAttention, Projection, project_together
from mhaprune.model.gates import GateConfig


@dataclass
class Call:
    """The gates of one forward pass, and a record of its attention weights."""

    gates: Mapping[Block, Tensor] = field(default_factory=dict)
    """A number for each head, (H,) or (B, H) or (B, H, T); a block that is missing has all heads open."""
    fallback: Mapping[Block, Tensor] = field(default_factory=dict)
    """What a closed head lets through instead of nothing; broadcasts to (B, H, T, K)."""
    weights: dict[Block, Tensor] | None = None
    """The weights (B, H, T, U), which the pass fills in block by block; None records nothing."""


class AttentionSublayer(nn.Module):
    """x + attention(norm(x)), with the keys and values of the sequence itself or given from outside.

    A block without heads adds the bias of W_O and computes nothing else.
    """

    def __init__(
        self, block: Block, d_model: int, num_heads: int, head_dim: int, dropout: float, gate: GateConfig | None
    ) -> None:
        super().__init__()
        self.block = block
        self.norm = nn.LayerNorm(d_model)
        self.attention = MultiHeadAttention(d_model, num_heads, head_dim=head_dim, dropout=dropout, gate=gate)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x_BTD: Tensor,
        call: Call,
        *,
        keys_values: tuple[Tensor, Tensor] | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        attention = self.attention
        if attention.num_heads == 0:
            merged_BTD = attention.out_proj(x_BTD[..., :0])
        else:
            context_BHTK = self.attend(x_BTD, keys_values, bias, is_causal=is_causal, record=call.weights)
            merged_BTD = attention.merge(context_BHTK, call.gates.get(self.block), call.fallback.get(self.block))
        return x_BTD + (self.dropout(merged_BTD) if self.training else merged_BTD)

    def attend(
        self,
        x_BTD: Tensor,
        keys_values: tuple[Tensor, Tensor] | None = None,
        bias: Tensor | None = None,
        *,
        is_causal: bool = False,
        record: dict[Block, Tensor] | None = None,
    ) -> Tensor:
        """The output of every head before gate and W_O, (B, H, T, K), of a block with heads."""
        attention, h_BTD = self.attention, self.norm(x_BTD)
        if keys_values is None:
            queries, keys, values = attention.project(h_BTD, h_BTD, h_BTD)
        else:
            queries, (keys, values) = attention.split(attention.q_proj(h_BTD)), keys_values
        how = {"is_causal": is_causal, "need_weights": record is not None}
        context_BHTK, weights_BHTU = attention.attend(queries, keys, values, bias, **how)
        if record is not None and weights_BHTU is not None:
            record[self.block] = weights_BHTU
        return context_BHTK


def project_memory(memory_BSD: Tensor, readers: Sequence[AttentionSublayer]) -> list[tuple[Tensor, Tensor] | None]:
    """The keys and values that each of several cross-attentions finds in the output of the encoder, in one product.

    A block without heads reads nothing: None.
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

    def forward(self, x_BSD: Tensor, bias: Tensor, call: Call) -> Tensor:
        return self.feed_forward(self.self_attention(x_BSD, call, bias=bias))


class DecoderLayer(nn.Module):
    """Causal self-attention over the target, cross-attention to the encoder's output, then feed-forward."""

    def __init__(self, self_attention: AttentionSublayer, cross: AttentionSublayer, feed_forward: FeedForward) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.cross = cross
        self.feed_forward = feed_forward

    def forward(self, x_BTD: Tensor, memory: tuple[Tensor, Tensor] | None, bias: Tensor, call: Call) -> Tensor:
        """`memory` is the encoder's output projected for the cross-attention; None if that has no heads."""
        # No padding mask here: targets are padded on the right, where a causal mask never lets a real position look.
        x_BTD = self.self_attention(x_BTD, call, is_causal=True)
        return self.feed_forward(self.cross(x_BTD, call, keys_values=memory, bias=bias))


def sinusoids(length: int, d_model: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Positions (length, D): sin and cos of t / 10000^(2i/D), interleaved (Vaswani et al. 2017, section 3.5).

    All is computed in `dtype`.
    """
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, d_model, 2, dtype=dtype) / d_model)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
