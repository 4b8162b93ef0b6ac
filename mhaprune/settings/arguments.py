"""The check at the door of a public function: each argument is of the type and in the range of its annotation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar, get_type_hints

from mhaprune.settings.ranges import check, expected, fits

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise ValueError, one line that names the argument, its value and what is allowed."""
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
                if not fits(hints()[name], each):
                    raise ValueError(f"{name}={_short(each)}: must be {expected(hints()[name])}")
                check(name, each, hints()[name])
        return function(*args, **kwargs)

    return door


def _short(value: object) -> str:
    """A value in one short line; the name of its type where that is not possible."""
    text = repr(value)
    return text if len(text) <= 100 and "\n" not in text else f"<{type(value).__name__}>"
