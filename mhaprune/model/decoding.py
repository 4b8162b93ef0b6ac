"""Greedy decoding, token by token, and the memory that saves it from reading the prefix again.

Dimensions: B = batch, T = positions so far, H = heads of a block, K = head_dim, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mhaprune.data import BOS, EOS, PAD


class KVCache:
    """The keys and values of the positions decoded so far, in memory taken once for `max_tokens` of them."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.length = max_tokens, 0
        self.stored: tuple[Tensor, Tensor] | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add (B, H, T, K) of the newest positions; returns those of all positions."""
        if self.stored is None:
            batch, heads, _, head_dim = keys.shape
            shape = (batch, heads, self.max_tokens, head_dim)
            self.stored = keys.new_empty(shape), values.new_empty(shape)
        start, self.length = self.length, self.length + keys.shape[2]
        for store, new in zip(self.stored, (keys, values), strict=True):
            store[:, :, start : self.length] = new
        return self.stored[0][:, :, : self.length], self.stored[1][:, :, : self.length]


@torch.no_grad()
def decode_greedily(
    next_logits: Callable[[Tensor], Tensor], source_BS: Tensor, max_tokens: int, *, stop: bool = False
) -> Tensor:
    """The most likely next token, `max_tokens` times: (B, max_tokens), padding after EOS.

    `next_logits` maps the tokens so far (B, T), which start with BOS, to logits (B, V). With `stop`, decoding ends when
    every sequence has ended.
    """
    tokens_BT = source_BS.new_full((len(source_BS), max_tokens + 1), PAD)
    tokens_BT[:, 0] = BOS
    ended_B = torch.zeros(len(source_BS), dtype=torch.bool, device=source_BS.device)
    for length in range(1, max_tokens + 1):
        next_B = next_logits(tokens_BT[:, :length]).argmax(dim=-1)
        tokens_BT[:, length] = next_B.masked_fill(ended_B, PAD)
        ended_B |= next_B == EOS
        if stop and bool(ended_B.all()):
            break
    return tokens_BT[:, 1:]
