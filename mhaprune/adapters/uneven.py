"""Attention of transformers for layers that lost heads unevenly. The package is imported only when it is needed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

UNEVEN = "mhaprune_sdpa"
"""Its name."""


def register() -> None:
    """Make it known to transformers under its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(UNEVEN, attend)
    AttentionMaskInterface.register(UNEVEN, sdpa_mask)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The fused attention of transformers, after each query head got the keys and values that it reads, and the part of
    the position bias that is its own."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    heads, of_kv = getattr(module, "kept_heads", None), getattr(module, "kept_of_kv", None)
    bias = options.get("position_bias")
    if heads is not None and bias is not None and bias.shape[1] != len(heads):
        options["position_bias"] = bias[:, heads]
    if of_kv is not None:
        key, value = key[:, of_kv], value[:, of_kv]
    result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return result
