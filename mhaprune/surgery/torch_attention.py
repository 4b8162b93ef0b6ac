"""Attention of torch.nn as a `MultiHeadAttention`, so that its output projection is really called.

`nn.MultiheadAttention` passes the weight of its `out_proj` to a function, so a hook on that module never fires.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.hooks.blocks import Unsupported


class TorchAttention(nn.MultiheadAttention):
    """A `nn.MultiheadAttention`, computed by a `MultiHeadAttention` with any number of heads.

    It is an instance of that class, because code may ask what its attention is, and leave out what it does not know.
    """

    in_proj_bias = None  # type: ignore[assignment]
    _qkv_same_embed_dim = False  # in evaluation, this keeps torch from its fused kernel

    def __init__(self, layer: MultiHeadAttention, batch_first: bool, names: Sequence[int]) -> None:
        nn.Module.__init__(self)
        self.layer, self.batch_first = layer, batch_first
        self.embed_dim = self.kdim = self.vdim = layer.out_proj.out_features
        self.names = tuple(names)
        """The remaining heads, by their numbers in the unpruned layer. They are needed because an attention mask may
        have a part for each head of the unpruned layer."""
        self.whole = layer.num_heads

    def __setstate__(self, state: Any) -> None:
        nn.Module.__setstate__(self, state)

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
    found = [*_of_torch(model)]
    if not found:
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, shared)
    layers, part = cache(_from_torch), cache(_part)  # shared attention and shared weights stay shared
    if found == [""]:
        return layers(model, part)
    for path in found:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layers(model.get_submodule(path), part))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = module.enable_nested_tensor = False
    return model


def _of_torch(model: nn.Module) -> Iterator[str]:
    """Yield the paths of attention of torch.nn. A subclass with a `forward` of its own counts in an encoder layer of
    torch alone, whose fused kernel calls neither."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, TorchAttention):
            holder = model.get_submodule(path.rpartition(".")[0])
            if not has_own_forward(module) or isinstance(holder, nn.TransformerEncoderLayer):
                yield path


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module is of a subclass of attention of torch.nn with another `forward`."""
    own = type(module).forward is not nn.MultiheadAttention.forward
    return own and isinstance(module, nn.MultiheadAttention) and not isinstance(module, TorchAttention)


def _from_torch(attention: nn.MultiheadAttention, part: Callable[..., nn.Parameter | None]) -> TorchAttention:
    if attention.bias_k is not None or attention.add_zero_attn:
        raise Unsupported("nn.MultiheadAttention with add_bias_kv or add_zero_attn has a key that no head makes")
    E = attention.embed_dim
    widths: Any = {"qdim": E, "kdim": attention.kdim, "vdim": attention.vdim, "dropout": attention.dropout}
    with torch.device("meta"):
        layer = MultiHeadAttention(E, attention.num_heads, bias=attention.in_proj_bias is not None, **widths)
    layer.head_mask = torch.ones(attention.num_heads, device=attention.out_proj.weight.device)
    layer.head_mask = layer.head_mask.to(attention.out_proj.weight.dtype)
    for n, name in enumerate(("q_proj", "k_proj", "v_proj")):
        apart = getattr(attention, f"{name}_weight")
        weight = part(attention.in_proj_weight, n, 3) if apart is None else apart
        setattr(layer, name, _linear(weight, part(attention.in_proj_bias, n, 3)))
    out: Any = attention.out_proj
    layer.out_proj = _linear(out.weight, out.bias)  # type: ignore[assignment]
    return TorchAttention(layer, attention.batch_first, range(attention.num_heads)).train(attention.training)


def _part(joint: nn.Parameter | None, part: int, of: int) -> nn.Parameter | None:
    """Return one of the equal parts of a weight, with the same storage."""
    return None if joint is None else nn.Parameter(joint.detach().chunk(of)[part], joint.requires_grad)


def _linear(weight: nn.Parameter | None, bias: nn.Parameter | None) -> nn.Linear:
    assert weight is not None
    linear = nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.out_features, linear.in_features = weight.shape
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    return linear
