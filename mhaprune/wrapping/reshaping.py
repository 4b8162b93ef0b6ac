"""Give a freshly built model the shapes that a removal of heads left.

This file imports nothing of mhaprune. A copy of it lies in saved folders, so that they can be read without mhaprune.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

UNEVEN = ("mhaprune_uneven", "mhaprune_uneven_eager")
"""The names of the attention for layers that lost heads unevenly: fused, and for models that have no fused one."""


def shrink(model: Any, shapes: Mapping[str, Sequence[int]], attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Give weights, by the path of their linear module or their own, these smaller shapes, in place. Those of linear
    modules are not filled."""
    for path, shape in shapes.items():
        owner, _, name = path.rpartition(".")
        module = getattr(model.get_submodule(owner), name)
        if isinstance(module, Tensor):
            dim = next(d for d, size in enumerate(shape) if size != module.shape[d])
            kept = (values.get("kept_numbers") for of, values in attributes.items() if path.startswith(f"{of}."))
            keep_numbers(model, path, next(filter(None, kept), range(shape[dim])), dim)
            continue
        outputs = shape[0] if isinstance(module, nn.Linear) else shape[1]
        bias = None if module.bias is None else module.bias.new_empty(outputs)
        store(module, module.weight.new_empty(tuple(shape)), bias)
    finish(model, attributes)


def finish(model: Any, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set attributes of modules, by path. The weights of the modules must have the new shapes already."""
    owners = []
    for path, values in attributes.items():
        module = model.get_submodule(path)
        if any(name.startswith("config.") for name in values):
            module.config = copy.copy(module.config)  # from which only this layer reads its sizes
            owners.append(module)
        for name, value in values.items():
            owner = module.config if name.startswith("config.") else module
            name = name.removeprefix("config.")
            if not isinstance(getattr(owner, name, value), int | list | None):
                raise ValueError(f"config.mhaprune: {path}.{name} counts no heads")
            setattr(owner, name, value)
        if "inputs_of_heads" in values:
            module.forward = partial(forward_with_kept_heads, module)
    if any("kept_of_kv" in values or "kept_heads" in values for values in attributes.values()):
        register()
        name = UNEVEN[not getattr(model, "_supports_sdpa", True)]
        model.set_attn_implementation(name)
        for module in owners:
            module.config._attn_implementation = name


def keep_numbers(model: Any, path: str, heads: Sequence[int], dim: int) -> Tensor:
    """Keep, in place, only the numbers of these heads in a parameter or buffer. Return what is left."""
    owner, _, name = path.rpartition(".")
    tensor = getattr(model.get_submodule(owner), name)
    left = tensor.detach().index_select(dim, torch.tensor(heads, device=tensor.device))
    if isinstance(tensor, nn.Parameter):
        left = nn.Parameter(left, tensor.requires_grad)
    setattr(model.get_submodule(owner), name, left)
    return left


def forward_with_kept_heads(module: Any, *arguments: Any, **named: Any) -> Any:
    """Call an attention module with the kept heads of each argument that has numbers of all heads."""
    given: dict[Any, Any] = {**dict(enumerate(arguments)), **named}
    for key, dim in zip(module.inputs_of_heads[::2], module.inputs_of_heads[1::2], strict=True):
        if isinstance(x := given.get(key), Tensor) and x.shape[dim] > 1:
            given[key] = x.index_select(dim, torch.tensor(module.kept_numbers, device=x.device))
    return type(module).forward(module, *(given.pop(n) for n in range(len(arguments))), **given)


def store(module: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Put a weight and a bias into a linear module."""
    module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=module.bias.requires_grad)
    names = ("out_features", "in_features") if isinstance(module, nn.Linear) else ("nx", "nf")
    for name, size in zip(names, weight.shape, strict=True):
        setattr(module, name, size)


def register() -> None:
    """Make the uneven attention known to transformers under its names."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    for name, mask in zip(UNEVEN, (sdpa_mask, eager_mask), strict=True):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Call the fused attention of transformers, or the model's own, for layers that lost heads unevenly: each query
    head gets its own keys, values and part of the position bias."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    compute = sdpa_attention_forward
    if getattr(getattr(module, "config", None), "_attn_implementation", None) == UNEVEN[1]:
        compute = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    heads, of_kv = getattr(module, "kept_heads", None), getattr(module, "kept_of_kv", None)
    bias = options.get("position_bias")
    if heads is not None and bias is not None and bias.shape[1] != len(heads):
        options["position_bias"] = bias[:, heads]
    if of_kv is not None:
        key, value = key[:, of_kv], value[:, of_kv]
    result: tuple[Tensor, Tensor | None] = compute(module, query, key, value, attention_mask, **options)
    return result
