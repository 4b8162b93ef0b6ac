"""Remove heads for real: smaller weights, the same function as with those heads masked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mhaprune.model.attention import MultiHeadAttention


@torch.no_grad()
def remove_heads(layer: MultiHeadAttention, kept: Sequence[int]) -> MultiHeadAttention:
    """A new layer with only the heads `kept`, by their position in `layer`, any number of them.

    Rows of W_Q, W_K and W_V and *columns* of W_O go; W_O's bias stays, also when no head does. The learned gate and
    the mask are folded into W_O, so the new layer has no gate. Its output equals that of `layer` with the other
    heads' gates at 0.
    """
    with torch.device("meta"):  # no initial weights, and no random numbers spent on them
        smaller = MultiHeadAttention(
            layer.embed_dim,
            len(kept),
            qdim=layer.q_proj.in_features,
            kdim=layer.k_proj.in_features,
            vdim=layer.v_proj.in_features,
            head_dim=layer.head_dim,
            dropout=layer.dropout,
            bias=layer.q_proj.bias is not None,
        )
    smaller = smaller.to_empty(device=layer.out_proj.weight.device).to(layer.out_proj.weight.dtype)
    smaller.head_mask.fill_(1.0)
    heads = torch.tensor(kept, dtype=torch.long, device=layer.out_proj.weight.device)
    for name in ("q_proj", "k_proj", "v_proj"):
        old, new = getattr(layer, name), getattr(smaller, name)
        _fill(new.weight, old.weight.unflatten(0, (layer.num_heads, layer.head_dim))[heads].flatten(0, 1))
        _fill(new.bias, None if old.bias is None else old.bias.view(layer.num_heads, layer.head_dim)[heads].flatten())
    columns_DHK = layer.out_proj.weight.unflatten(1, (layer.num_heads, layer.head_dim))
    gated_DHK = columns_DHK * layer.head_scale()[:, None]
    _fill(smaller.out_proj.weight, gated_DHK[:, heads].flatten(1))
    _fill(smaller.out_proj.bias, layer.out_proj.bias)
    return smaller.train(layer.training)


def _fill(parameter: Tensor | None, value: Tensor | None) -> None:
    if parameter is not None and value is not None:
        parameter.copy_(value)
