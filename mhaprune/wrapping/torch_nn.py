"""Attention of torch.nn as a `MultiHeadAttention`, so that its output projection is really called.

`nn.MultiheadAttention` passes the weight of its `out_proj` to a function, so a hook on that module never fires.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.wrapping.blocks import Unsupported


class TorchAttention(nn.Module):
    """A `nn.MultiheadAttention`, computed by a `MultiHeadAttention` with any number of heads."""

    in_proj_bias: ClassVar[None] = None
    _qkv_same_embed_dim: ClassVar[bool] = False  # in evaluation, this keeps torch from its fused kernel

    def __init__(self, layer: MultiHeadAttention, batch_first: bool, names: Sequence[int]) -> None:
        super().__init__()
        self.layer, self.batch_first = layer, batch_first
        self.names = tuple(names)
        """The remaining heads, by their numbers in the unpruned layer. They are needed because an attention mask may
        have a part for each head of the unpruned layer."""
        self.whole = layer.num_heads

    @property
    def num_heads(self) -> int:
        return self.layer.num_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `nn.MultiheadAttention`. A query that may attend to nothing receives zeros; torch returns NaN for it."""
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            same = query is key is value
            query = query.transpose(0, 1)
            key, value = (query, query) if same else (key.transpose(0, 1), value.transpose(0, 1))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (len(query), self.whole))[:, list(self.names)]
        causal = is_causal and attn_mask is None  # with a mask, torch takes `is_causal` as a hint that it is one
        out, weights = self.layer(
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            is_causal=causal,
            need_weights=need_weights,
        )
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights


def converted(model: nn.Module) -> nn.Module:
    """Return a copy that shares all weights, in which attention of torch.nn can be gated and cut; or the model itself,
    if it has none.

    Raises `Unsupported` for attention that cannot be converted.
    """
    if not any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, shared)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _from_torch(module).train(module.training))
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = module.enable_nested_tensor = False
    return model


def _from_torch(attention: nn.MultiheadAttention) -> TorchAttention:
    if attention.bias_k is not None or attention.add_zero_attn:
        raise Unsupported("nn.MultiheadAttention with add_bias_kv or add_zero_attn has a key that no head makes")
    E = attention.embed_dim
    widths: Any = {"qdim": E, "kdim": attention.kdim, "vdim": attention.vdim, "dropout": attention.dropout}
    with torch.device("meta"):
        layer = MultiHeadAttention(E, attention.num_heads, bias=attention.in_proj_bias is not None, **widths)
    layer.head_mask = torch.ones(attention.num_heads, device=attention.out_proj.weight.device)
    layer.head_mask = layer.head_mask.to(attention.out_proj.weight.dtype)
    joint = attention.in_proj_weight
    weights = (
        (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight) if joint is None else joint.chunk(3)
    )
    biases = (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
    for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
        setattr(layer, name, _linear(weight, bias))
    layer.out_proj = _linear(attention.out_proj.weight, attention.out_proj.bias)  # type: ignore[assignment]
    return TorchAttention(layer, attention.batch_first, range(attention.num_heads))


def _linear(weight: Tensor | None, bias: Tensor | None) -> nn.Linear:
    assert weight is not None
    linear = nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.out_features, linear.in_features = weight.shape
    parameter = partial(nn.Parameter, requires_grad=weight.requires_grad)
    linear.weight = parameter(weight.detach())
    if bias is not None:
        linear.bias = parameter(bias.detach())
    return linear
