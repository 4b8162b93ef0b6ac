"""One call of a multi-head attention layer, step by step, every tensor with its shape.

The steps follow the textbook, not the layer's own code, so that the two can be compared.

Dimensions: B = batch, T = queries, U = keys, D = embed_dim, H = heads, K = head_dim.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from mhaprune.attention.layer import MultiHeadAttention


class Step(NamedTuple):
    """A tensor of a call, from the inputs to the output: its name, its formula, its axes and its value."""

    name: str
    formula: str
    axes: tuple[str, ...]
    value: Tensor


class LayerCall(NamedTuple):
    """A layer and its inputs: query (B, T, qdim), key (B, U, kdim), value (B, U, vdim), and a `bias` to be added to the
    scores, which broadcasts to (B, 1, T, U)."""

    layer: MultiHeadAttention
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None


@torch.no_grad()
def walk(call: LayerCall) -> list[Step]:
    """Return every step from the inputs to the output (B, T, D). A layer without learned gates has gates of 1."""
    layer, query, key, value, bias = call
    q_BTW, k_BUW, v_BUW = layer.q_proj(query), layer.k_proj(key), layer.v_proj(value)
    q_BHTK, k_BHUK, v_BHUK = map(layer.split, (q_BTW, k_BUW, v_BUW))
    raw_BHTU = q_BHTK @ k_BHUK.mT
    scaled_BHTU = raw_BHTU / math.sqrt(layer.head_dim)
    masked_BHTU = scaled_BHTU if bias is None else scaled_BHTU + bias
    weights_BHTU = masked_BHTU.softmax(dim=-1).masked_fill(masked_BHTU == -math.inf, 0.0)
    context_BHTK = weights_BHTU @ v_BHUK
    gate_1H11 = layer.head_scale()[None, :, None, None]
    merged_BTW = layer.gated(context_BHTK)
    return [
        Step("query input", "X", ("B", "T", "qdim"), query),
        Step("key input", "Y", ("B", "U", "kdim"), key),
        Step("value input", "Z", ("B", "U", "vdim"), value),
        Step("queries", "Q = X W_Q + b_Q", ("B", "T", "H·K"), q_BTW),
        Step("keys", "K = Y W_K + b_K", ("B", "U", "H·K"), k_BUW),
        Step("values", "V = Z W_V + b_V", ("B", "U", "H·K"), v_BUW),
        Step("queries, split", "Q_n, of head n", ("B", "H", "T", "K"), q_BHTK),
        Step("keys, split", "K_n, of head n", ("B", "H", "U", "K"), k_BHUK),
        Step("values, split", "V_n, of head n", ("B", "H", "U", "K"), v_BHUK),
        Step("scores", "Q_n K_nᵀ", ("B", "H", "T", "U"), raw_BHTU),
        Step("scaled scores", "Q_n K_nᵀ / √K", ("B", "H", "T", "U"), scaled_BHTU),
        Step("masked scores", "−∞ where it is forbidden to look", ("B", "H", "T", "U"), masked_BHTU),
        Step("weights", "A_n = softmax over the keys", ("B", "H", "T", "U"), weights_BHTU),
        Step("head outputs", "C_n = A_n V_n", ("B", "H", "T", "K"), context_BHTK),
        Step("gate", "g, a number per head", ("1", "H", "1", "1"), gate_1H11),
        Step("gated outputs", "g_n C_n", ("B", "H", "T", "K"), layer.split(merged_BTW)),
        Step("merged heads", "[g_1 C_1 … g_H C_H]", ("B", "T", "H·K"), merged_BTW),
        Step("output", "[g_1 C_1 … g_H C_H] W_O + b_O", ("B", "T", "D"), layer.out_proj(merged_BTW)),
    ]


@torch.no_grad()
def head_by_head(call: LayerCall) -> Tensor:
    """Return the output (B, T, D) as a sum over separate attentions, one per head, each with its own projections: query
    (qdim, K), key (kdim, K), value (vdim, K), output (K, D). One wide projection must give the same."""
    layer = call.layer
    output_BTD = call.query.new_zeros(*call.query.shape[:2], layer.embed_dim)
    if layer.out_proj.bias is not None:
        output_BTD = output_BTD + layer.out_proj.bias
    for n, output_DK in enumerate(layer.effective_output().split(layer.head_dim, dim=1)):
        part = slice(n * layer.head_dim, (n + 1) * layer.head_dim)
        q_BTK, k_BUK, v_BUK = (
            F.linear(x, projection.weight[part], None if projection.bias is None else projection.bias[part])
            for x, projection in ((call.query, layer.q_proj), (call.key, layer.k_proj), (call.value, layer.v_proj))
        )
        scores_BTU = q_BTK @ k_BUK.mT / math.sqrt(layer.head_dim)
        if call.bias is not None:
            scores_BTU = scores_BTU + call.bias.squeeze(1)
        weights_BTU = scores_BTU.softmax(dim=-1).masked_fill(scores_BTU == -math.inf, 0.0)
        output_BTD = output_BTD + (weights_BTU @ v_BUK) @ output_DK.mT
    return output_BTD


@torch.no_grad()
def largest_difference(call: LayerCall) -> float:
    """Compute the output of the call in three ways (layer, last step, sum of the separate heads), in float64, and
    return the largest difference from the layer; NaN if one of the three has a NaN."""
    inputs: Any = (each if each is None else each.double() for each in call[1:])
    call = LayerCall(copy.deepcopy(call.layer).double(), *inputs)
    output, _ = call.layer(call.query, call.key, call.value, attn_mask=call.bias)
    others = torch.stack([walk(call)[-1].value, head_by_head(call)])
    return float((others - output).abs().max())


def steps_table(steps: Sequence[Step]) -> pd.DataFrame:
    """Return one row per step of a call: its shape in symbols and in numbers."""
    return pd.DataFrame(
        {
            "step": range(1, len(steps) + 1),
            "tensor": [step.name for step in steps],
            "formula": [step.formula for step in steps],
            "axes": [" × ".join(step.axes) for step in steps],
            "shape": [" × ".join(map(str, step.value.shape)) for step in steps],
        }
    )


def values_table(steps: Sequence[Step], head: int) -> pd.DataFrame:
    """Return one row per number in the tensors of the first example; of tensors with an axis of heads, only `head`."""
    parts = []
    for number, step in enumerate(steps, 1):
        value = step.value[0]
        matrix = value[min(head, len(value) - 1)] if "H" in step.axes else value
        places = pd.MultiIndex.from_product([range(size) for size in matrix.shape], names=["row", "column"])
        parts.append(places.to_frame(index=False).assign(step=number, value=matrix.flatten().tolist()))
    return pd.concat(parts, ignore_index=True)[["step", "row", "column", "value"]]
