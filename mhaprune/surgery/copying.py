"""Copies of models that share no weights, or only some."""

import copy
import gc
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from mhaprune.hooks.blocks import Unsupported
from mhaprune.hooks.eval_mode import HELD
from mhaprune.hooks.pytree import mapped
from mhaprune.surgery.reshaping import UNEVEN, register


def copied(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a module that shares no weights. The result equals that of `copy.deepcopy`, in a fifth of the
    time, but that functions which hold a part of the module, as closures do, hold its copy. A run makes hundreds of
    copies."""
    if not memo and sum(weight.numel() for weight in module.parameters()) > 2**26:
        gc.collect()  # earlier copies, which hold themselves, would fill the memory
    memo = {} if memo is None else memo
    twin = _twin(module, memo)
    for part in twin.modules():
        for name, value in [*vars(part).items()]:
            if (name not in HELD or value) and name != "_modules" and _reaches(value, memo, set()):
                object.__setattr__(part, name, _bound(value, memo))
    return twin


@contextmanager
def alone(model: nn.Module, original: nn.Module) -> Iterator[None]:
    """Raise `Unsupported` if a part of the original runs while the context lasts, in which only its copy should."""
    foreign = {part: path for path, part in original.named_modules()}
    for part in model.modules():
        foreign.pop(part, None)

    def entered(module: nn.Module, *_: Any) -> None:
        if module in foreign:
            raise Unsupported(
                f"{foreign[module]}: is called through something that no copy of the model has of its own, such as a"
                " global variable; call it through an attribute of a module"
            )

    handle = register_module_forward_pre_hook(entered)
    try:
        yield
    finally:
        handle.remove()


def _twin(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if id(module) in memo:
        known: nn.Module = memo[id(module)]
        return known
    if isinstance(module, torch.jit.ScriptModule):
        return copy.deepcopy(module, memo)
    memo[id(module)] = twin = type(module).__new__(type(module))
    if (note := getattr(vars(module).get("config"), "mhaprune", None)) is not None:
        memo[id(note)] = note  # nothing writes to it, and with neurons it is long
    for name, value in vars(module).items():
        if name == "_compiled_call_impl":  # which calls the module that was compiled, not its copy
            continue
        if name == "_modules":
            mine: Any = {key: None if child is None else _twin(child, memo) for key, child in value.items()}
        else:
            # Only leaves of a graph can be copied; others, such as attention weights, are results of a call.
            leaves = value if name in HELD else mapped(value, lambda x: x if x.is_leaf else x.detach())
            try:
                mine = value.copy() if name in HELD and not value else copy.deepcopy(leaves, memo)
            except TypeError:  # of what cannot be copied, such as a lock; `alone` finds a part behind it that runs
                mine = value
        object.__setattr__(twin, name, mine)  # one by one: so they are faster to look up in every later call
    return twin


def _reaches(value: Any, memo: dict[int, Any], seen: set[int]) -> bool:
    """Return whether a function in a value holds something that was copied."""
    if memo.get(id(value), value) is not value:
        return True
    if isinstance(value, FunctionType) and id(value) not in seen:
        seen.add(id(value))
        return any(_reaches(each, memo, seen) for each in _held(value))
    return any(_reaches(each, memo, seen) for each in _parts(value))


def _bound(value: Any, memo: dict[int, Any]) -> Any:
    """Return a value in which functions hold copies in place of what was copied."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType) and _reaches(value, memo, set()):
        cells = tuple(CellType() for _ in value.__closure__ or ())
        memo[id(value)] = twin = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        twin.__dict__.update(value.__dict__)
        twin.__qualname__, twin.__module__, twin.__doc__ = value.__qualname__, value.__module__, value.__doc__
        twin.__defaults__, twin.__kwdefaults__ = _bound(value.__defaults__, memo), _bound(value.__kwdefaults__, memo)
        for cell, own in zip(value.__closure__ or (), cells, strict=True):
            if cell != CellType():
                own.cell_contents = _bound(cell.cell_contents, memo)
        return twin
    if isinstance(value, MethodType):
        return MethodType(_bound(value.__func__, memo), _bound(value.__self__, memo))
    if type(value) is partial:
        named = {name: _bound(each, memo) for name, each in value.keywords.items()}
        return partial(_bound(value.func, memo), *(_bound(each, memo) for each in value.args), **named)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _bound(each, memo)) for key, each in value.items())
    return type(value)(_bound(each, memo) for each in value) if type(value) in (list, tuple) else value


def _held(function: FunctionType) -> list[Any]:
    """Return what a function holds: the variables of its closure and its defaults."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _parts(value: Any) -> Iterable[Any]:
    if type(value) is partial:
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__]
    return value.values() if type(value) in (dict, OrderedDict) else value if type(value) in (list, tuple) else ()


def in_double(module: nn.Module, of: nn.Module) -> nn.Module:
    """Return a copy of a model, or of a part `of` it, that computes in float64."""
    double = {id(weight): nn.Parameter(as_double(weight), weight.requires_grad) for weight in module.parameters()}
    module = copied(module, double | {id(buffer): as_double(buffer) for buffer in module.buffers()})
    # The eager attention of transformers takes its softmax in float32, whatever the model computes in.
    for config in (getattr(part, "config", None) for part in module.modules() if getattr(of, "_supports_sdpa", False)):
        name = getattr(config, "_attn_implementation", None)
        if name in ("eager", f"{UNEVEN}eager"):
            config._attn_implementation = "sdpa" if name == "eager" else register("sdpa")  # type: ignore[union-attr]
    return module


def as_double(tensor: Tensor) -> Tensor:
    """Return a copy in float64; of whole numbers a plain copy."""
    return tensor.detach().to(torch.double if tensor.is_floating_point() else tensor.dtype, copy=True)
