"""What a model returned, whatever it is: a tensor, or dicts and tuples of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in it, in its order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
