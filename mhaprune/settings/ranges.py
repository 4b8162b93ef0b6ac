"""Ranges as data: `steps: Annotated[int, Ge(1)]` gives the allowed values of a field, and `Checked` refuses others.

A range is any object that supports `value in range`. Its text completes the sentence "must be ...".
"""

import functools
import inspect
import math
import numbers
import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Bound:
    """A range with one end."""

    bound: float

    allows: ClassVar[Callable[[float, float], bool]]
    words: ClassVar[str]

    def __contains__(self, value: float) -> bool:
        return type(self).allows(value, self.bound)

    def __str__(self) -> str:
        return self.words.format(self.bound)


class Ge(Bound):
    allows, words = operator.ge, "{} or more"


class Gt(Bound):
    allows, words = operator.gt, "above {}"


class Lt(Bound):
    allows, words = operator.lt, "below {}"


@dataclass(frozen=True)
class Within:
    """A range with two ends, both allowed."""

    least: float
    most: float

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"from {self.least} to {self.most}"


@dataclass(frozen=True)
class Distinct:
    """A range for a list: at least one value, and all values different."""

    def __contains__(self, values: tuple[object, ...]) -> bool:
        return 0 < len(values) == len(set(values))

    def __str__(self) -> str:
        return "one or more values, all different"


Sizes = Annotated[tuple[Annotated[int, Within(1, 2**16)], ...], Distinct()]
"""Sizes at which something is measured. The upper bound is far above any useful size, and protects the memory."""


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@dataclass(frozen=True)
class Checked:
    """A dataclass that checks the ranges of its fields at construction, so that errors stop a run before it starts.

    Raises ValueError with the field, its value and what is allowed. A subclass compares fields with each other in its
    own `__post_init__`, after this one.
    """

    def __post_init__(self) -> None:
        cls: type = type(self)
        hints = _hints(cls)
        for field in fields(self):
            if (value := getattr(self, field.name)) is not (plain := python_number(value)):
                object.__setattr__(self, field.name, plain)
            check(field.name, plain, hints[field.name])


def python_number(value: Any) -> Any:
    """Return a number of NumPy, or those in a tuple, as Python's, which JSON can hold; others as they are."""
    if isinstance(value, tuple) and any(python_number(item) is not item for item in value):
        return tuple(map(python_number, value))
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


def check(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError unless `value`, and each item of a tuple, is in the ranges of its type hint.

    None is always accepted here, because it means a setting that was left out. `fits` checks if the type allows None.
    """
    if value is None:
        return
    if get_origin(hint) is Annotated:
        whole, (hint, *ranges) = hint, get_args(hint)
        if not fits(hint, value) and (not isinstance(value, float) or math.isfinite(value)):
            raise ValueError(f"{name}={_short(value)}: must be {expected(whole)}")
        allowed = " and ".join(map(str, ranges))
        finite = True
        if isinstance(value, float) and all(math.inf in one for one in ranges):
            allowed, finite = f"{allowed} and finite", math.isfinite(value)
        if not finite or not all(value in one for one in ranges):
            raise ValueError(f"{name}={list(value) if isinstance(value, tuple) else value}: must be {allowed}")
    if get_origin(hint) in (Union, types.UnionType):
        for one in [one for one in get_args(hint) if fits(one, value)][:1]:
            check(name, value, one)
    if get_origin(hint) is tuple:
        for i, item in enumerate(value):
            check(f"{name}[{i}]", item, get_args(hint)[0])


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError unless a value is of a type."""
    if not fits(hint, value):
        raise ValueError(f"{name}={_short(value)}: must be {expected(hint)}")


def fits(kind: Any, value: Any) -> bool:
    """Return whether a value is of a type. Unlike in Python, a bool is not a number, a text is not a list, and NaN and
    infinity are not numbers."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is Annotated:
        return fits(arguments[0], value)
    if origin in (Union, types.UnionType):
        return any(fits(one, value) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is Callable:
        return callable(value)
    if origin in (Sequence, tuple):
        return isinstance(value, Sequence) and not isinstance(value, str) and all(fits(arguments[0], v) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(one, each) for pair in value.items() for one, each in zip(arguments, pair, strict=True)
        )
    if kind is types.NoneType:
        return value is None
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return origin is None and isinstance(value, {float: numbers.Real, int: numbers.Integral}.get(kind, kind))


def expected(kind: Any) -> str:
    """Return the allowed values of a type in words. They complete the sentence "must be ..."."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Callable:
        return "a function"
    if origin is Sequence:
        return f"a list, each {expected(arguments[0])}"
    if origin is Annotated:
        return ", ".join([expected(arguments[0]), *map(str, arguments[1:])])
    if origin in (Union, types.UnionType):
        return " or ".join(expected(one) for one in arguments)
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"a list in brackets, each {expected(arguments[0])}"
    if origin is dict:
        return f"names with, each, {expected(arguments[1])}"
    if isinstance(kind, type) and is_dataclass(kind):
        return f"settings with a _target_ that names a {kind.__name__}"
    names = {
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        bool: "true or false",
        types.NoneType: "null",
        Any: "anything",
    }
    if kind in names or not isinstance(kind, type):
        return names.get(kind, str(kind))
    return f"a {kind.__name__} of {kind.__module__.partition('.')[0]}"


P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function check its arguments. A wrong one raises ValueError: name, value and what is allowed."""
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        taken = {name: kind for name, kind in function.__annotations__.items() if name != "return"}
        return get_type_hints(
            SimpleNamespace(__annotations__=taken), inspect.unwrap(function).__globals__, include_extras=True
        )

    @functools.wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name not in hints():
                continue
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for each in value if several else [value]:
                check_type(name, each, hints()[name])
                check(name, each, hints()[name])
        return function(*args, **kwargs)

    return door


def _short(value: object) -> str:
    """Return a value in one short line; if that is not possible, the name of its type."""
    text = repr(value)
    return text if len(text) <= 100 and "\n" not in text else f"<{type(value).__name__}>"
