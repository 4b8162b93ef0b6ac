"""Describe a function of the user so that another description means another function.

A name and the instructions do not decide what a function computes. Its constants, defaults, closure and attributes do
too, and the global values and functions that it names, also in a lambda, a generator or a class inside of it. Of a
module that is no installed package, the attributes that are named are described.
"""

import dis
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import BuiltinFunctionType, CodeType, FunctionType, GenericAlias, MethodType, ModuleType, UnionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mhaprune.storage.cache import tensor_digest

FIXED = {"torch", "numpy", "transformers", "mhaprune", "builtins", *sys.stdlib_module_names} - {"__main__"}
"""Packages whose functions are known by their name and the version of the package. Others are too if pip has put them
where it puts packages."""
INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, GenericAlias, UnionType)
"""The types of values that their text describes."""
BY_TEXT = {"globals", "locals", "eval", "exec", "__import__"}
"""Functions that read what a text names."""
OF_MODULE = {"getattr", "vars"}
"""Functions that read what a text names in a module."""
OUTSIDE = {"environ", "getenv", "import_module", "load", "read_text", "read_bytes", "fromfile", "read_csv"}
"""Names of what is read from outside of the function."""
NOTES = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__qualname__", "__match_args__"}
NOTES |= {
    "__dataclass_fields__",
    "__dataclass_params__",
    "__abstractmethods__",
    "__orig_bases__",
    "__parameters__",
    "_abc_impl",
}
"""Entries of a class that compute nothing."""


class Undescribed(ValueError):
    """A value whose content cannot be read, so that two of them cannot be told apart."""


def described(value: Any) -> Any:
    """Return plain values that decide what a function computes. Raises `Undescribed`, which names the type."""
    return _Description()(value)


class _Description:
    """Describe values. One that comes again is described once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, Any]] = {}
        """The number of each value, by its identity, and the value, so that no other gets its identity."""

    def __call__(self, value: Any) -> Any:
        if value is None or type(value) in PLAIN:
            return [type(value).__name__, repr(value)]
        if id(value) in self.known:
            return f"number {self.known[id(value)][0]}"
        self.known[id(value)] = len(self.known), value
        return self.content(value)

    def each(self, *parts: Any) -> list[Any]:
        return [self(part) for part in parts]

    def content(self, value: Any) -> Any:
        match value:
            case Tensor() if value.layout is torch.strided:
                return [str(value.dtype), list(value.shape), tensor_digest(value)]
            case np.ndarray() | np.generic() if not value.dtype.hasobject:
                return [str(value.dtype), list(value.shape), np.ascontiguousarray(value).tobytes().hex()]
            case ModuleType():
                return [value.__name__, _version(value.__name__)]
            case partial():
                return ["partial", *self.each(value.func, value.args, value.keywords)]
            case MethodType():
                return ["method", *self.each(value.__func__, value.__self__)]
            case CodeType():
                names = [list(value.co_names), list(value.co_varnames), value.co_argcount, value.co_flags]
                return [value.co_code.hex(), *names, *self.each(*value.co_consts)]
            case type() | FunctionType() | BuiltinFunctionType() if _fixed(str(value.__module__)):
                return [f"{value.__module__}.{value.__qualname__}", _version(str(value.__module__))]
            case FunctionType():
                return self.function(value)
            case type():
                body = {name: part for name, part in vars(value).items() if name not in NOTES}
                return [value.__qualname__, *self.each(type(value), *value.__bases__, body)]
            case staticmethod() | classmethod():
                return self(value.__func__)
            case property():
                return self.each(value.fget)
            case nn.Module():
                return self.each([(path, type(part), _held(part)) for path, part in value.named_modules()])
        parts: list[Any] = [type(value).__name__]
        if isinstance(value, Mapping):
            parts += [self.each(*item) for item in value.items()]
        elif isinstance(value, list | tuple):
            parts += self.each(*value)
        elif isinstance(value, set | frozenset):
            parts += self.each(*sorted(value, key=repr))
        elif isinstance(value, int | float | complex | str | bytes):
            parts.append(repr(value))
        elif not hasattr(value, "__dict__") or _fixed(str(type(value).__module__), but="mhaprune"):
            raise Undescribed(f"a {type(value).__name__}")
        if type(value).__module__ != "builtins":
            parts += self.each(type(value), getattr(value, "__dict__", None))
        return parts

    def function(self, value: FunctionType) -> Any:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        names = list(dict.fromkeys(_names(value.__code__)))
        named = {name: value.__globals__[name] for name in names if name in value.__globals__}
        modules = [part for part in (*cells, *named.values()) if isinstance(part, ModuleType)]
        modules += [_imported(name) for name in _imports(value.__code__)]
        own = [module for module in modules if not _fixed(module.__name__)]
        of_text = (BY_TEXT | {"open"} | (OF_MODULE if own else set())) & set(_globals(value.__code__))
        outside = sorted([*of_text, *(OUTSIDE & {*names}), *["sys.modules"] * ({"sys", "modules"} <= {*names})])
        if outside:
            raise Undescribed(f"{value.__qualname__}, which reads what {outside[0]} returns")
        return [
            value.__qualname__,
            *self.each(value.__code__, value.__defaults__, value.__kwdefaults__, cells, named, vars(value)),
            *(self.of_module(module, names) for module in own),
        ]

    def of_module(self, module: ModuleType, names: list[str]) -> list[Any]:
        """Describe the attributes of a module that are named, also those of modules in it."""
        found = []
        for name in (name for name in names if hasattr(module, name)):
            value = getattr(module, name)
            inner = isinstance(value, ModuleType) and not _fixed(value.__name__) and value is not module
            found.append([name, self.of_module(value, names) if inner else self(value)])
        return [module.__name__, found]


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function and in what is defined inside of it."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names(part)


def _globals(code: CodeType) -> Iterator[str]:
    """Yield the names of globals alone."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _globals(part)


def _imports(code: CodeType) -> Iterator[str]:
    """Yield the modules that are imported when the function is called."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _imports(part)


def _imported(name: str) -> ModuleType:
    if (module := sys.modules.get(name)) is None and _fixed(name):
        module = ModuleType(name)
    if module is None:
        raise Undescribed(f"an import of {name or 'a part of its own package'}")
    return module


def _fixed(module: str, but: str = "") -> bool:
    """Return whether a module is of a package that its version identifies."""
    package = module.partition(".")[0]
    if package in FIXED:
        return package != but
    file = getattr(sys.modules.get(module), "__file__", None)
    return bool(file and file.startswith(INSTALLED) and _version(package))


def _held(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds itself: weights, buffers, attributes, and hooks if it has some."""
    empty = (name for name, value in vars(module).items() if isinstance(value, dict | set) and not value)
    left_out = {"_modules", *empty}
    return {name: value for name, value in vars(module).items() if name not in left_out}


def _version(module: str) -> str:
    try:
        return version(module.partition(".")[0])
    except (PackageNotFoundError, ValueError):
        return ""
