"""The network one sublayer at a time, so that a map can be changed before anything after it is computed.

Dimensions: B = batch, S = source, T = target, D = d_model, H = heads of a block, K = head_dim, W = inputs of a map.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from mhaprune.data import PAD, Examples, shift_right
from mhaprune.model.layers import AttentionSublayer, FeedForward, project_memory
from mhaprune.model.network import EncoderDecoder


class Sublayer(NamedTuple):
    """A sublayer adds to the residual stream what its last linear map makes of its hidden values: x + W h + b."""

    name: str
    """That of the attention block, or for example `encoder.0.feed_forward`."""
    feed_forward: bool
    """Whether it is a feed-forward part; else it is an attention block."""
    stream: Tensor
    """The residual stream x before it, (B, T, D)."""
    hidden: Tensor
    """What the last map reads, (B, T, W): the gated outputs of the heads side by side, W = 0 for a block without heads;
    or the hidden values of the feed-forward part."""
    last: nn.Linear
    """That map: W_O, or W_2."""
    valid: Tensor
    """(B, T): False on padding."""

    def output(self) -> Tensor:
        """The residual stream after it, (B, T, D), by what the map is now; dropout is left out."""
        return self.stream + self.last(self.hidden)


def sublayers(model: EncoderDecoder, batch: Examples) -> Iterator[Sublayer]:
    """Every sublayer of a pass over a batch, in forward order, before its last map is applied.

    That happens when the next one is asked for. So a map that was changed by then decides all that follows.
    """
    bias, source_BS, target_BT = model.bias(batch.source), batch.source != PAD, batch.target != PAD
    x = model.embed(model.source_embedding, batch.source)
    for i, encoder_layer in enumerate(model.encoder):
        yield (step := _attention(encoder_layer.self_attention, x, source_BS, bias=bias))
        yield (step := _feed_forward(f"encoder.{i}", encoder_layer.feed_forward, step.output(), source_BS))
        x = step.output()
    memory_BSD = model.encoder_norm(x)
    x = model.embed(model.target_embedding, shift_right(batch.target))
    for i, layer in enumerate(model.decoder):
        yield (step := _attention(layer.self_attention, x, target_BT, is_causal=True))
        (keys_values,) = project_memory(memory_BSD, [layer.cross])
        yield (step := _attention(layer.cross, step.output(), target_BT, keys_values=keys_values, bias=bias))
        yield (step := _feed_forward(f"decoder.{i}", layer.feed_forward, step.output(), target_BT))
        x = step.output()


def _attention(sublayer: AttentionSublayer, x_BTD: Tensor, valid_BT: Tensor, **how: Any) -> Sublayer:
    attention, hidden_BTW = sublayer.attention, x_BTD[..., :0]
    if attention.num_heads:
        hidden_BTW = attention.gated(sublayer.attend(x_BTD, **how))
    return Sublayer(str(sublayer.block), False, x_BTD, hidden_BTW, attention.out_proj, valid_BT)


def _feed_forward(layer: str, sublayer: FeedForward, x_BTD: Tensor, valid_BT: Tensor) -> Sublayer:
    *before, last, _ = sublayer
    hidden = x_BTD
    for module in before:
        hidden = module(hidden)
    assert isinstance(last, nn.Linear)
    return Sublayer(f"{layer}.feed_forward", True, x_BTD, hidden, last, valid_BT)
