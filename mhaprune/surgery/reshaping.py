"""Give a freshly built model the shapes that a removal of heads left.

This file imports nothing of mhaprune but `windows`. A copy of both lies in saved folders, so that they can be read
without mhaprune.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhaprune.hooks.blocks import Block
from mhaprune.hooks.windows import Generate, attend_in_windows

UNEVEN = "mhaprune_uneven_"
"""The begin of the names of the attention for layers that lost heads unevenly. The name of the attention that then
computes follows."""

KEPT_IN = "kept_in"
"""The begin of the names of attributes that say what is left of a tensor with a part for each head or key-value head,
that is no parameter: the dimension of these, their number in the model before any removal, and the numbers of those
that are left."""

VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}
UNFLATTENS = {Tensor.unflatten, torch.unflatten}
SPLITS = {Tensor.split, torch.split}
FOLDS = {*VIEWS, Tensor.flatten, torch.flatten}
MEET = {
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv"),
    *("where", "masked_fill", "maximum", "minimum", "scaled_dot_product_attention"),
}
"""The names of functions, without underscores, in which a tensor with a part for each head may meet the heads."""
FOLDED = "_folded_heads"
"""The attribute of a tensor that `Sizes` marks."""


def shrink(model: Any, shapes: Mapping[str, Sequence[int]], attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Give a model the shapes and attributes that are left, in place."""
    give_shapes(model, shapes, attributes)
    finish(model, attributes)


def give_shapes(model: Any, shapes: Mapping[str, Sequence[int]], attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Give weights, by the path of their linear module or their own, these smaller shapes, in place. Those of linear
    modules, and parameters, are not filled."""
    tied = ties(model)
    for path, shape in shapes.items():
        owner, _, name = path.rpartition(".")
        module = getattr(model.get_submodule(owner), name)
        if isinstance(module, nn.Parameter):
            empty = nn.Parameter(module.new_empty(tuple(shape)), module.requires_grad)
            setattr(model.get_submodule(owner), name, empty)
            continue
        if places := attributes.get(owner, {}).get(f"{KEPT_IN}.{name}"):
            dim, parts, *kept = places
            keep_numbers(model, path, kept, dim, parts)
            continue
        if isinstance(module, Tensor):
            dim = next(d for d, size in enumerate(shape) if size != module.shape[d])
            holders = (values for of, values in attributes.items() if path.startswith(f"{of}." if of else ""))
            kept = (values.get("kept_numbers") for values in holders)
            heads = next(filter(None, kept), range(shape[dim]))
            keep_numbers(model, path, heads, dim, module.shape[dim] * len(heads) // shape[dim])
            continue
        outputs = shape[1] if type(module).__name__ == "Conv1D" else shape[0]
        bias = None if module.bias is None else module.bias.new_empty(outputs)
        store(module, module.weight.new_empty(tuple(shape)), bias)
    tie(model, tied)


def ties(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def tie(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Make parameters one again, in place, if they were cut to the same shape."""
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for path in others:
            owner, _, name = path.rpartition(".")
            if model.get_parameter(path).shape == parameter.shape:
                setattr(model.get_submodule(owner), name, parameter)


def finish(model: Any, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set attributes of modules, by path. The weights of the modules must have the new shapes already."""
    for path, values in attributes.items():
        module = model.get_submodule(path)
        for holder in {name.rpartition(".")[0] for name in values} - {"", "axes_lengths", KEPT_IN}:
            setattr(module, holder, copy.copy(getattr(module, holder)))  # from which only this layer reads its sizes
        for name, value in values.items():
            if name.startswith(f"{KEPT_IN}."):  # see `give_shapes`
                continue
            if name.startswith("axes_lengths."):  # of a layer of einops, which holds them twice
                module.axes_lengths = module.axes_lengths | {name.removeprefix("axes_lengths."): value}
                module._axes_lengths = tuple(module.axes_lengths.items())
                continue
            holder, _, name = name.rpartition(".")
            owner = getattr(module, holder) if holder else module
            if not isinstance(getattr(owner, name, value), int | float | list | None):
                raise ValueError(f"config.mhaprune: {path}.{name} counts no heads")
            setattr(owner, name, value)
        if "inputs_of_heads" in values or "sizes_of_heads" in values:
            kept = getattr(module, "kept_of_all", None)
            sizes = [Sizes(each, kept) for each in by_block(getattr(module, "sizes_of_heads", []))]
            surround(module, forward_of_fewer_heads, sizes)
        if "silent_columns" in values:
            surround(module, forward_without_silent)
        if values.keys() & {"kept_of_kv", "kept_heads", "streams"}:
            attend_unevenly(model, path)
        if "streams" in values:
            model.generate = Generate(model)


def surround(module: Any, function: Any, *facts: Any) -> None:
    """Make each call of a module a call of this function, which is given the module and its forward so far."""
    inner = _without(vars(module).get("forward") or Forward(module), function)  # of an earlier removal
    module.forward = partial(function, module, inner, *facts)


def freed(module: Any, function: Any) -> None:
    """Take away what `surround` made with this function, in place."""
    module.forward = _without(module.forward, function)
    if isinstance(module.forward, Forward):
        del module.forward


def _without(forward: Any, function: Any) -> Any:
    if not isinstance(forward, partial):
        return forward
    inner = _without(forward.args[1], function)
    same = forward.func.__name__ == function.__name__
    return inner if same else partial(forward.func, forward.args[0], inner, *forward.args[2:])


class Forward:
    """The forward of the class of a module."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return type(self.module).forward(self.module, *arguments, **named)


def forward_without_silent(module: Any, inner: Any, x: Tensor) -> Any:
    """Call W_O of a layer without heads. It reads zeros from the silent head, so no training can wake it."""
    features = 1 - module.weight.dim()  # after examples in a convolution, else the last
    awake = x.movedim(features, -1)[..., module.silent_columns :]
    return inner(nn.functional.pad(awake, (module.silent_columns, 0)).movedim(-1, features))


def attend_unevenly(model: Any, path: str) -> None:
    """Make the attention module at `path` compute by `attend`, with the same kind of attention as before."""
    words = path.split(".")
    around: list[Any] = [model.get_submodule(".".join(words[:length])) for length in range(len(words))]
    if not (parts := [part for part in around if hasattr(part, "set_attn_implementation")]):
        raise ValueError(f"{path}: has heads that differ, which only a model of transformers can")
    config = getattr(model.get_submodule(path), "config", parts[-1].config)
    kind = str(config._attn_implementation or "eager").removeprefix(UNEVEN)
    if not can_be_uneven(kind):
        warnings.warn(f"attn_implementation={kind}: is now sdpa, as heads were removed unevenly", stacklevel=2)
        kind = "sdpa"
    for part in parts:
        part.set_attn_implementation = Switch(part, kind)
    config._attn_implementation = register(kind)


def can_be_uneven(kind: str) -> bool:
    """Return whether `attend` can compute by this attention: fused, eager, or a function of the user's."""
    from transformers import AttentionInterface

    function = AttentionInterface().get(kind)
    own = function is not None and not getattr(function, "__module__", "").startswith("transformers.")
    return kind in ("sdpa", "eager") or (own and "/" not in kind)


class Switch:
    """The `set_attn_implementation` of a model that lost heads unevenly: it switches to another attention, in the form
    that `attend` computes. A process that unpickles it knows this form."""

    def __init__(self, part: Any, kind: str) -> None:
        self.part, self.kind = part, kind

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        register(self.kind)

    def __call__(self, attn_implementation: Any, **_: Any) -> None:
        kind = str(attn_implementation).removeprefix(UNEVEN)
        if not can_be_uneven(kind):
            allowed = "must be sdpa, eager or a function of your own, as heads were removed unevenly"
            raise ValueError(f"attn_implementation={attn_implementation}: {allowed}")
        if kind in ("sdpa", "eager"):
            self.part.get_correct_attn_implementation(kind)  # raises if the model has none of this kind
        self.kind, name = kind, register(kind)
        type(self.part).set_attn_implementation(self.part, name)
        configs: list[Any] = [getattr(module, "config", None) for module in self.part.modules()]
        for config in configs:
            if hasattr(config, "_attn_implementation"):
                config._attn_implementation = name  # also of a single layer, see `finish`


def keep_numbers(model: Any, path: str, kept: Sequence[int], dim: int, heads: int) -> Tensor:
    """Keep only the numbers of the heads `kept` in a parameter or buffer, in place. Return what is left. `heads` is the
    number of heads before."""
    owner, _, name = path.rpartition(".")
    tensor = getattr(model.get_submodule(owner), name)
    places = torch.arange(tensor.shape[dim], device=tensor.device).unflatten(0, (heads, -1))
    left = tensor.detach().index_select(dim, places[list(kept)].flatten())
    if isinstance(tensor, nn.Parameter):
        left = nn.Parameter(left, tensor.requires_grad)
    holder = model.get_submodule(owner)
    setattr(holder, name, left)
    if isinstance(holder, nn.Linear):
        holder.out_features, holder.in_features = holder.weight.shape
    return left


def forward_of_fewer_heads(module: Any, inner: Any, sizes: Sequence[Sizes], *arguments: Any, **named: Any) -> Any:
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
    if torch.jit.is_tracing() and any(each.kept is not None for each in sizes):
        raise RuntimeError("torch.jit.trace follows no sizes of fewer heads than code names, use torch.export")
    with ExitStack() as stack:
        for each in sizes:
            stack.enter_context(each)
        Sizes.running.append(sizes)
        stack.callback(Sizes.running.pop)
        return inner(*arguments, **named)


def pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the pairs of a list of first, second, first, second, ..."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def by_block(sizes: Sequence[int]) -> list[dict[int, int]]:
    """Return the sizes that code names, with the ones that are left, for each block of a module. Each begins with two
    zeros, but for the only one of a model that an earlier version has cut."""
    found: list[dict[int, int]] = [{}] if sizes and sizes[0] else []
    for name, now in pairs(sizes):
        if name:
            found[-1][name] = now
        else:
            found.append({})
    return found


def tables(
    before: Sequence[int], block: Block, keep: Sequence[int], made: Sequence[tuple[int, int]], beside: Sequence[Block]
) -> list[int]:
    """Return tables of the sizes that code names, each with the one that is left: those `before`, with that of this
    block. `made` holds the widths of its linear modules, before and after. Blocks `beside` it keep their tables."""
    H, G, K = block.heads, len(set(block.of_kv)), block.head_dim
    left = len({block.of_kv[h] for h in keep})
    now = {H: len(keep), G: left, H * K: len(keep) * K, G * K: left * K} | dict(made)
    mine = (table for table in by_block(before) if not beside or {H, H * K} <= {*table.values()})
    own = next(mine, {size: size for size in now})
    alike = any((each.heads, each.head_dim) == (H, K) for each in beside)
    found = [each for each in by_block(before) if beside and (alike or each != own)]
    found.append({name: now.get(last, last) for name, last in own.items()})
    return [size for table in found for pair in [(0, 0), *table.items()] for size in pair]


class Sizes(TorchFunctionMode):
    """A mode of torch in which code that names the sizes of all heads gets those of the kept ones.

    `now` holds the present number of heads, first, and the present widths, by the ones that the code names. Translated
    are views that split a width into heads or join heads to a width, splits of a width, and expansions. Of a tensor
    that a call makes for all heads, such as slopes, those that are `kept` meet what the heads compute.
    """

    running: ClassVar[list[Sequence[Sizes]]] = []
    """The modes of each call that has begun, of which the last one knows which heads meet."""

    def __init__(self, now: Mapping[int, int], kept: Sequence[int] | None = None) -> None:
        super().__init__()
        self.now, self.heads, self.kept = now, next(iter(now)), kept
        self.before = {new: [old for old in now if now[old] == new] for new in now.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VIEWS and len(args) > 1 and not isinstance(args[1], torch.dtype):
            sizes = args[1] if isinstance(args[1], tuple | list) else args[1:]
            args = (args[0], self._viewed(args[0].shape, sizes, getattr(args[0], FOLDED, None)))
        elif func in UNFLATTENS and len(args) > 2:
            x, dim, sizes = args
            args = (x, dim, self._viewed([1, x.shape[dim]], [1, *sizes])[1:])
        elif func is Tensor.expand and len(args) > 1:
            sizes = args[1] if isinstance(args[1], tuple | list) else args[1:]
            args = (args[0], self._expanded([1] * (len(sizes) - args[0].dim()) + [*args[0].shape], sizes))
        elif func in SPLITS and len(args) > 1:
            x, size, *dim = args
            if (dim[0] if dim else (kwargs or {}).get("dim", 0)) in (-1, x.dim() - 1):  # not along positions
                args = (x, self._split(x.shape[-1], size), *dim)
        kwargs = kwargs or {}
        if place := self._met(func, [*args, *kwargs.values()]):
            left = partial(self._left, place=place)
            args, kwargs = [*map(left, args)], {name: left(x) for name, x in kwargs.items()}
        said = func(*args, **kwargs)
        if isinstance(said, Tensor):
            self._mark(func, args, said)
        return said

    def _met(self, func: Any, given: Sequence[Any]) -> int:
        """Return the dimension, counted from the last, in which tensors of all heads and of the kept ones meet; 0 if
        there is none, or more than one."""
        mine = self.kept is not None and any(self is each for each in chain(*self.running[-1:]))
        if not mine or getattr(func, "__name__", "").strip("_") not in MEET:
            return 0
        tensors, met = [x for x in given if isinstance(x, Tensor)], {self.heads, self.now[self.heads]}
        places = (3,) if func is F.scaled_dot_product_attention else (1, 2, 3, 4)  # its factors differ in others
        sizes = {n: [x.shape[-n] for x in tensors if x.dim() >= n] for n in places}
        found = [n for n in places if len(met) == 2 and whole(*sizes[n]) and {*sizes[n]} - {1} == met]
        return found[0] if len(found) == 1 else 0

    def _left(self, x: Any, place: int) -> Any:
        if not isinstance(x, Tensor) or x.dim() < place or x.shape[-place] != self.heads:
            return x
        return x.index_select(-place, torch.tensor(self.kept, device=x.device))

    def _mark(self, func: Any, args: Any, said: Tensor) -> None:
        """Mark a tensor whose first dimension is that of examples and heads, with the place of the heads: 1 if they
        stood behind the examples, else 0."""
        alike = [x for x in args if isinstance(x, Tensor) and whole(*x.shape, *said.shape) and said.dim()]
        if func in FOLDS and alike and alike[0].dim() == said.dim() + 1 > 3:
            (one, other, *rest), now = alike[0].shape, self.now[self.heads]
            if [*said.shape] == [one * other, *rest] and now in (one, other):
                setattr(said, FOLDED, int(other == now))
            return
        for x in alike:
            if hasattr(x, FOLDED) and x.dim() == said.dim() and x.shape[0] == said.shape[0]:
                setattr(said, FOLDED, getattr(x, FOLDED))

    def _viewed(self, shape: Sequence[Any], sizes: Sequence[Any], folded: int | None = None) -> Sequence[Any]:
        if len(shape) == 1:  # a number for each head, as a gate
            return self._counted(shape, sizes, anywhere=True) or sizes
        if len(shape) > 1 and sizes and whole(shape[-1], sizes[-1]):
            if (made := self._folded(shape, sizes, folded)) is not None:
                return made
            if (made := self._before_pixels(shape, sizes)) is not None:
                return made
            split = self._in_heads(shape, sizes) if shape[-1] in self.before else sizes
            if split is sizes and (counted := self._counted(shape, sizes)) is not None:
                return counted
            sizes = split
            if new := self.now.get(sizes[-1]):
                last = [math.prod(shape[n:]) for n in range(len(shape))] if -1 in sizes and whole(*shape) else []
                if new in last or new * math.prod(sizes[:-1]) == math.prod(shape):
                    return [*sizes[:-1], new]
            return self._counted(shape, sizes, anywhere=True) or sizes
        return sizes

    def _folded(self, shape: Sequence[Any], sizes: Sequence[Any], folded: int | None) -> Sequence[int] | None:
        """Return the sizes of a view that puts examples and heads into one dimension, the first, or takes them apart as
        they were put together; None for another view."""
        if len(shape) < 3 or not whole(*shape, *sizes):
            return None
        old, new = self.heads, self.now[self.heads]
        if [*shape[2:]] == [*sizes[1:]] and any(shape[n] == new and sizes[0] == shape[1 - n] * old for n in (0, 1)):
            return [shape[0] * shape[1], *sizes[1:]]
        if folded is None or [*shape[1:]] != [*sizes[2:]] or shape[0] % new:
            return None
        places = [n for n in (folded, 1 - folded) if sizes[n] == old and sizes[1 - n] in (-1, shape[0] // new)]
        return [*sizes[: places[0]], new, *sizes[places[0] + 1 :]] if places else None

    def _expanded(self, have: Sequence[Any], sizes: Sequence[Any]) -> Sequence[Any]:
        """Return the sizes of an expansion. A size of 1 is that of one head that is left where heads stand, or where
        nothing else is expanded; elsewhere there may be as many examples or positions as heads."""
        alone = sum(n not in (-1, now) for n, now in zip(sizes, have, strict=True)) == 1 and have[-1] != 1
        places = {n for n, now in enumerate(have) if now != 1 or alone or n in (1, len(have) - 3)}
        pairs = enumerate(zip(sizes, have, strict=True))
        return [now if self.now.get(n) == now and at in places else n for at, (n, now) in pairs]

    def _before_pixels(self, shape: Sequence[int], sizes: Sequence[int]) -> Sequence[int] | None:
        """Return the sizes of a view that joins the rows and columns of a picture, or takes them apart, with the number
        of kept heads, or their width, before them; None for another view."""
        if not whole(*shape, *sizes) or len(shape) < 3 or len(sizes) < 3 or _fits(shape, sizes):
            return None
        pixels = 1 if sizes[-1] == shape[-2] * shape[-1] else 2 if sizes[-2] * sizes[-1] == shape[-1] else 0
        places = [m for m in reversed(range(len(sizes) - pixels)) if pixels and sizes[m] in self.now]
        tried = [[*sizes[:m], self.now[sizes[m]], *sizes[m + 1 :]] for m in places]
        return next((new for new in tried if _fits(shape, new)), None)

    def _counted(self, shape: Sequence[int], sizes: Sequence[int], anywhere: bool = False) -> Sequence[int] | None:
        """Return the sizes of a view with the kept number of heads where they name that of all, as in a view of scores:
        before sizes that stay, or `anywhere` if the numbers do not fit otherwise. None if there is no such place."""
        counted = [n for n in reversed(range(len(sizes))) if whole(sizes[n])]
        named = [n for n in counted if self.now.get(sizes[n], sizes[n]) != sizes[n]]
        if not named or not whole(*shape, *sizes):
            return None
        tried = {n: [*sizes[:n], self.now[sizes[n]], *sizes[n + 1 :]] for n in named}
        for n, new in tried.items():
            if len(new) - n > 2 and [*shape[n - len(sizes) :]] == new[n:] and _fits(shape, new):
                return new
        if not anywhere or _fits(shape, sizes):
            return None
        return next((new for new in tried.values() if _fits(shape, new)), None)

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


def _fits(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    known, count = abs(math.prod(sizes)), math.prod(shape)
    return known > 0 and (count % known == 0 if -1 in sizes else count == known)


def whole(*sizes: Any) -> bool:
    """Return whether all sizes are numbers, and none a symbol of an export."""
    return {*map(type, sizes)} <= {int}


def store(module: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Put a weight and a bias into a linear module."""
    module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=module.bias.requires_grad)
    names = ("out_features", "in_features") if isinstance(module, nn.Linear) else ("nx", "nf")
    names = ("out_channels", "in_channels") if weight.dim() > 2 else names
    for name, size in zip(names, weight.shape, strict=False):
        setattr(module, name, size)


def register(kind: str) -> str:
    """Make the uneven form of a kind of attention known to transformers. Return its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name, masks = f"{UNEVEN}{kind}", AttentionMaskInterface()
    AttentionInterface.register(name, attend)
    if kind in masks:
        AttentionMaskInterface.register(name, masks[kind])
    return name


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Call the attention that a model had for layers that lost heads unevenly: each query head gets its own keys,
    values and part of the position bias."""
    from transformers import AttentionInterface

    config = getattr(module, "config", None)
    kind = getattr(config, "_attn_implementation", "sdpa").removeprefix(UNEVEN)
    if kind == "eager":
        homes = (vars(sys.modules[base.__module__]) for base in type(module).__mro__)
        compute = next(home["eager_attention_forward"] for home in homes if "eager_attention_forward" in home)
    else:
        compute = AttentionInterface()[kind]
    heads, of_kv = getattr(module, "kept_heads", None), getattr(module, "kept_of_kv", None)
    bias = options.get("position_bias")
    if heads is not None and bias is not None and bias.shape[1] != len(heads):
        options["position_bias"] = bias[:, heads]
    if getattr(module, "streams", None):
        dtype = query.dtype if kind == "eager" else None
        return attend_in_windows(compute, module, query, key, value, attention_mask, of_kv, dtype, options)
    if of_kv is not None:
        key, value = key[:, of_kv], value[:, of_kv]
    result: tuple[Tensor, Tensor | None] = compute(module, query, key, value, attention_mask, **options)
    return result
