"""Describe a function of the user so that another description means another function.

A name and the instructions do not decide what a function computes. Its constants, defaults, closure and attributes do
too, and the global values and functions that it names.
"""

import sys
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mhaprune.storage.cache import tensor_digest

FIXED = {"torch", "numpy", "transformers", "mhaprune", "builtins", *sys.stdlib_module_names} - {"__main__"}
"""Packages whose functions are known by their name and the version of the package."""


class Undescribed(ValueError):
    """A value whose content cannot be read, so that two of them cannot be told apart."""


def described(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """Return plain values that decide what a function computes. Raises `Undescribed`, which names the type."""
    if id(value) in seen:  # a function that calls itself
        return "again"
    each = _Inside(seen | {id(value)})
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | torch.device():
            return [type(value).__name__, repr(value)]
        case Tensor():
            return [str(value.dtype), list(value.shape), tensor_digest(value)]
        case np.ndarray() | np.generic():
            return [str(value.dtype), list(value.shape), np.ascontiguousarray(value).tobytes().hex()]
        case ModuleType():
            return [value.__name__, _version(value.__name__)]
        case partial():
            return ["partial", *each(value.func, value.args, value.keywords)]
        case MethodType():
            return ["method", *each(value.__func__, value.__self__)]
        case CodeType():
            return [value.co_code.hex(), list(value.co_names), *each(*value.co_consts)]
        case type() | FunctionType() | BuiltinFunctionType() if str(value.__module__).partition(".")[0] in FIXED:
            return [f"{value.__module__}.{value.__qualname__}", _version(str(value.__module__))]
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            named = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
            return [value.__qualname__, *each(value.__code__, value.__defaults__, value.__kwdefaults__, cells, named)]
        case type():
            body = {name: part for name, part in vars(value).items() if not name.startswith("__") or name == "__call__"}
            return [value.__qualname__, *each(*value.__bases__, body)]
        case Mapping():
            return [type(value).__name__, *sorted(map(str, (each(*item) for item in value.items())))]
        case list() | tuple():
            return [type(value).__name__, *each(*value)]
        case set() | frozenset():
            return [type(value).__name__, *sorted(map(str, each(*value)))]
        case staticmethod() | classmethod():
            return each(value.__func__)
        case property():
            return each(value.fget)
        case nn.Module():
            return each(type(value), dict(value.state_dict()), _plain(value))
    if not hasattr(value, "__dict__") or str(type(value).__module__).partition(".")[0] in FIXED - {"mhaprune"}:
        raise Undescribed(f"a {type(value).__name__}")
    return each(type(value), vars(value))


class _Inside:
    """Describe the parts of a value."""

    def __init__(self, seen: frozenset[int]) -> None:
        self.seen = seen

    def __call__(self, *parts: Any) -> list[Any]:
        return [described(part, self.seen) for part in parts]


def _plain(module: nn.Module) -> list[Any]:
    """Return the numbers and texts that are attributes of a module and its parts."""
    parts = (item for part in module.modules() for item in vars(part).items())
    return [(name, value) for name, value in parts if isinstance(value, bool | int | float | str)]


def _version(module: str) -> str:
    try:
        return version(module.partition(".")[0])
    except (PackageNotFoundError, ValueError):
        return ""
