"""Give a freshly built model the shapes that a removal of heads left.

This file imports nothing of mhaprune. A copy of it lies in saved folders, so that they can be read without mhaprune.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

UNEVEN = ("mhaprune_uneven", "mhaprune_uneven_eager")
"""The names of the attention for layers that lost heads unevenly: fused, and for models that have no fused one."""

VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}
SPLITS = {Tensor.split, torch.split}


def shrink(model: Any, shapes: Mapping[str, Sequence[int]], attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Give a model the shapes and attributes that are left, in place."""
    give_shapes(model, shapes, attributes)
    finish(model, attributes)


def give_shapes(model: Any, shapes: Mapping[str, Sequence[int]], attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Give weights, by the path of their linear module or their own, these smaller shapes, in place. Those of linear
    modules are not filled."""
    for path, shape in shapes.items():
        owner, _, name = path.rpartition(".")
        module = getattr(model.get_submodule(owner), name)
        if isinstance(module, Tensor):
            dim = next(d for d, size in enumerate(shape) if size != module.shape[d])
            holders = (values for of, values in attributes.items() if path.startswith(f"{of}." if of else ""))
            kept = (values.get("kept_numbers") for values in holders)
            heads = next(filter(None, kept), range(shape[dim]))
            keep_numbers(model, path, heads, dim, module.shape[dim] * len(heads) // shape[dim])
            continue
        outputs = shape[0] if isinstance(module, nn.Linear) else shape[1]
        bias = None if module.bias is None else module.bias.new_empty(outputs)
        store(module, module.weight.new_empty(tuple(shape)), bias)


def finish(model: Any, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set attributes of modules, by path. The weights of the modules must have the new shapes already."""
    for path, values in attributes.items():
        module = model.get_submodule(path)
        if any(name.startswith("config.") for name in values):
            module.config = copy.copy(module.config)  # from which only this layer reads its sizes
        for name, value in values.items():
            owner = module.config if name.startswith("config.") else module
            name = name.removeprefix("config.")
            if not isinstance(getattr(owner, name, value), int | list | None):
                raise ValueError(f"config.mhaprune: {path}.{name} counts no heads")
            setattr(owner, name, value)
        if "inputs_of_heads" in values or "sizes_of_heads" in values:
            sizes = getattr(module, "sizes_of_heads", None)
            module.forward = partial(forward_of_fewer_heads, module, sizes and Sizes(dict(pairs(sizes))))
    uneven = [path for path, values in attributes.items() if "kept_of_kv" in values or "kept_heads" in values]
    if uneven:
        register()
    for part in {part: None for path in uneven for part in _with_attention(model, path)}:
        part.set_attn_implementation = partial(switch_attention, part)
        eager = getattr(part.config, "_attn_implementation", None) in ("eager", UNEVEN[1])
        part.set_attn_implementation(UNEVEN[eager or not getattr(part, "_supports_sdpa", True)])


def _with_attention(model: Any, path: str) -> list[Any]:
    """Return the models of transformers that hold the module at `path`, the outermost first."""
    parts = ((place, part) for place, part in model.named_modules() if hasattr(part, "set_attn_implementation"))
    if not (found := [part for place, part in parts if path.startswith(f"{place}." if place else "")]):
        raise ValueError(f"{path}: loses heads unevenly, which only a model of transformers can")
    return found


def switch_attention(part: Any, attn_implementation: Any, **_: Any) -> None:
    """Switch a model that lost heads unevenly to fused or eager attention, in the form that `attend` computes. This
    replaces the `set_attn_implementation` of the model."""
    plain = ("sdpa", "eager")
    if attn_implementation not in (*plain, *UNEVEN):
        allowed = "must be sdpa or eager, as heads were removed unevenly"
        raise ValueError(f"attn_implementation={attn_implementation}: {allowed}")
    if attn_implementation in plain:
        part.get_correct_attn_implementation(attn_implementation)  # raises if the model has none of this kind
        attn_implementation = UNEVEN[plain.index(attn_implementation)]
    type(part).set_attn_implementation(part, attn_implementation)
    modules = [module for module in part.modules() if hasattr(getattr(module, "config", None), "_attn_implementation")]
    shared = {id(module.config) for module in modules if hasattr(module, "set_attn_implementation")}
    for config in (module.config for module in modules if id(module.config) not in shared):
        config._attn_implementation = attn_implementation  # of a single layer, see `finish`


def keep_numbers(model: Any, path: str, kept: Sequence[int], dim: int, heads: int) -> Tensor:
    """Keep only the numbers of the heads `kept` in a parameter or buffer, in place. Return what is left. `heads` is the
    number of heads before."""
    owner, _, name = path.rpartition(".")
    tensor = getattr(model.get_submodule(owner), name)
    places = torch.arange(tensor.shape[dim], device=tensor.device).unflatten(0, (heads, -1))
    left = tensor.detach().index_select(dim, places[list(kept)].flatten())
    if isinstance(tensor, nn.Parameter):
        left = nn.Parameter(left, tensor.requires_grad)
    setattr(model.get_submodule(owner), name, left)
    return left


def forward_of_fewer_heads(module: Any, sizes: Sizes | None, *arguments: Any, **named: Any) -> Any:
    """Call an attention module that was written for all heads, with the kept heads of its arguments and with the sizes
    that are left."""
    if hasattr(module, "inputs_of_heads"):
        given: dict[Any, Any] = {**dict(enumerate(arguments)), **named}
        for key, dim in pairs(module.inputs_of_heads):
            if isinstance(x := given.get(key), Tensor) and x.shape[dim] % module.all_heads == 0:
                heads = torch.tensor(module.kept_numbers, device=x.device)
                by_head = x.unflatten(dim, (-1, module.all_heads))  # examples and heads may share the dimension
                given[key] = by_head.index_select(dim, heads).flatten(dim - 1, dim)
        arguments, named = tuple(given.pop(n) for n in range(len(arguments))), given
    with sizes or nullcontext():
        return type(module).forward(module, *arguments, **named)


def pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the pairs of a list of first, second, first, second, ..."""
    return list(zip(flat[::2], flat[1::2], strict=True))


class Sizes(TorchFunctionMode):
    """A mode of torch in which code that names the sizes of all heads gets those of the kept ones.

    `now` holds the present number of heads, and the present widths, by the ones that the code names. Translated are
    views that split a width into heads or join heads to a width, and splits of a width.
    """

    def __init__(self, now: Mapping[int, int]) -> None:
        super().__init__()
        self.now = now
        self.before = {new: [old for old in now if now[old] == new] for new in now.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VIEWS and len(args) > 1 and not isinstance(args[1], torch.dtype):
            sizes = args[1] if isinstance(args[1], tuple | list) else args[1:]
            args = (args[0], self._viewed(args[0].shape, sizes))
        elif func in SPLITS and len(args) > 1:
            x, size, *dim = args
            if (dim[0] if dim else (kwargs or {}).get("dim", 0)) in (-1, x.dim() - 1):  # not along positions
                args = (x, self._split(x.shape[-1], size), *dim)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _viewed(self, shape: Sequence[Any], sizes: Sequence[Any]) -> Sequence[Any]:
        if len(shape) > 1 and sizes and whole(shape[-1], sizes[-1]):
            if shape[-1] in self.before:
                sizes = self._in_heads(shape, sizes)
            if (new := self.now.get(sizes[-1])) and new * math.prod(sizes[:-1]) == math.prod(shape):
                return [*sizes[:-1], new]
        return sizes

    def _in_heads(self, shape: Sequence[Any], sizes: Sequence[Any]) -> Sequence[Any]:
        width, lead, tail = shape[-1], sizes[: len(shape) - 1], sizes[len(shape) - 1 :]
        for old in self.before[width] if whole(*tail) else ():
            parts = [old // -math.prod(tail) if each == -1 else each for each in tail]
            if math.prod(parts) == old and all(a in (-1, b) for a, b in zip(lead, shape[:-1], strict=True)):
                # The heads stand before their width, as a rule; so also where both, or heads and parts, are as many.
                for n in sorted(range(len(parts)), key=lambda n: (n != len(parts) - 2, -n)):
                    if self.now.get(parts[n], 0) * old == parts[n] * width:
                        return [*lead, *parts[:n], self.now[parts[n]], *parts[n + 1 :]]
        return sizes

    def _split(self, width: Any, size: Any) -> Any:
        parts = size if isinstance(size, tuple | list) else [size]
        if whole(width, *parts) and any(old % sum(parts) == 0 for old in self.before.get(width, ())):
            parts = [self.now.get(each, each) for each in parts]
        return list(parts) if isinstance(size, tuple | list) else parts[0]


def whole(*sizes: Any) -> bool:
    """Return whether all sizes are numbers, and none a symbol of an export."""
    return {*map(type, sizes)} <= {int}


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
