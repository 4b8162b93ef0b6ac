"""Tensors in nested values, and the linear modules that make them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def is_linear(module: Any) -> bool:
    """Return whether a module is linear: that of torch, or GPT-2's `Conv1D`, whose weight is transposed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def precise(values: Tensor) -> Tensor:
    """Return real numbers in float32 at least: in half precision, a difference of two losses is mostly rounding."""
    return values.float() if values.is_floating_point() and values.dtype.itemsize < 4 else values


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested mappings, lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested mappings, lists and tuples with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed: Any = copy.copy(value)  # a dict of its own kind, as outputs of transformers are
        for key, each in value.items():
            changed[key] = mapped(each, change)
        return changed
    if isinstance(value, tuple | list):
        parts = [mapped(each, change) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
