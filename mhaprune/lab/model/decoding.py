"""Greedy decoding of the small transformer, token by token, with a cache of keys and values.

Dimensions: B = batch, T = positions so far, S = source, D = d_model, H = heads of a block, K = head_dim, V =
vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mhaprune.attention.layer import side_by_side
from mhaprune.lab.model.layers import AttentionSublayer
from mhaprune.lab.tasks.sequences import BOS, EOS, PAD

Step = Callable[[Tensor], Tensor]
"""A function that computes a sublayer for the newest position of every sequence: (B, D) to (B, D)."""


class KVCache:
    """The keys and values of the positions decoded so far. The memory for `max_tokens` positions is taken once."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.length = max_tokens, 0
        self.stored: Tensor | None = None

    def append(self, newest_B2HK: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of the newest position. Return the keys and the values of all positions so far, (B,
        H, T, K) each."""
        if self.stored is None:
            batch, two, heads, head_dim = newest_B2HK.shape
            self.stored = newest_B2HK.new_empty(batch, two, heads, self.max_tokens, head_dim)
        self.stored[:, :, :, self.length] = newest_B2HK
        self.length += 1
        keys, values = self.stored[:, :, :, : self.length].unbind(1)
        return keys, values


def attention_step(
    sublayer: AttentionSublayer,
    gates_H: Tensor | None,
    max_tokens: int,
    memory: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> Step:
    """Return a function that computes the sublayer for one new position.

    Called for one position after the other, the function returns the outputs that the sublayer returns for the whole
    text at once. With a `memory`, keys and values of (B, H, S, K), each position attends to the memory. Without one, it
    attends to all positions so far. `bias` is added to the scores. Whatever is the same for all tokens is computed
    here, once, because the time of decoding depends on the number of operations. One matrix makes queries, keys and
    values, and the gates, which are the same for all examples, are multiplied into W_O. There is no dropout.
    """
    attention, norm = sublayer.attention, sublayer.norm
    heads, output_bias = attention.num_heads, attention.out_proj.bias
    if heads == 0:
        return lambda x_BD: x_BD + output_bias
    output_DW = attention.effective_output(gates_H)
    own = (attention.k_proj, attention.v_proj) if memory is None else ()
    weight, projection_bias = side_by_side([attention.q_proj, *own])
    cache = KVCache(max_tokens)

    def step(x_BD: Tensor) -> Tensor:
        projected = F.linear(norm(x_BD), weight, projection_bias).unflatten(-1, (-1, heads, attention.head_dim))
        keys, values = cache.append(projected[:, 1:]) if memory is None else memory
        context_BH1K = F.scaled_dot_product_attention(projected[:, 0].unsqueeze(2), keys, values, bias)
        return x_BD + F.linear(context_BH1K.flatten(1), output_DW, output_bias)

    return step


@torch.no_grad()
def decode_greedily(
    next_logits: Callable[[Tensor], Tensor], source_BS: Tensor, max_tokens: int, *, stop: bool = False
) -> Tensor:
    """Return the most likely next token, `max_tokens` times: (B, max_tokens), with padding after EOS.

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
