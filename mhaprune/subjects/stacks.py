"""Batches in the form of a user, read as stacks of examples that can be computed in one pass.

Dimensions: E = examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mhaprune.hooks.pytree import tensors_in

DENSE = "dense output"
"""The name of the field that holds the dense model's output, for a loss to read. No argument can have this name."""
CORRUPT = "corrupt "
"""The begin of the names of the values of the corrupt counterparts."""

Column = Tensor | list[Any]
"""One entry per example."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Examples that can be computed in one pass: their tensors have the same shapes, and the rest of their batches is
    equal."""

    fields: Mapping[str, Column]
    """The tensors and lists by name, with one entry per example."""
    constants: Mapping[str, Any]
    """The other values of a batch, which belong to all of its examples."""

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """The shapes and types of one example's tensors."""
        return {
            name: (value.shape[1:], value.dtype) if isinstance(value, Tensor) else list
            for name, value in self.fields.items()
        }

    @cached_property
    def width(self) -> int:
        """The number of columns of the first field that has columns."""
        tensors = (value for value in self.fields.values() if isinstance(value, Tensor) and value.dim() > 1)
        return next((value.shape[1] for value in tensors), 1)

    def fits(self, other: Stack) -> bool:
        """Return whether examples of both can share a pass."""
        alike = self.shapes == other.shapes and self.constants.keys() == other.constants.keys()
        return alike and all(equal(value, other.constants[name]) for name, value in self.constants.items())

    @property
    def parts(self) -> tuple[Mapping[str, Column], Mapping[str, Any]]:
        """The fields and the constants."""
        return self.fields, self.constants

    def equal_to(self, other: Stack) -> int:
        """Return how many examples have the same values in `other`, in the same row."""
        alike = all(equal(x, other.constants.get(name)) for name, x in self.constants.items())
        same = [torch.full((len(self),), alike)]
        for name, x in self.fields.items():
            y: Any = other.fields[name]
            rows = (x == y).reshape(len(x), -1).all(dim=1).cpu() if isinstance(x, Tensor) else map(equal, x, y)
            same.append(torch.as_tensor(list(rows)))
        return int(torch.stack(same).all(dim=0).sum())

    def select(self, rows: Tensor) -> Stack:
        """Return the examples in these rows."""
        fields: dict[str, Column] = {}
        for name, value in self.fields.items():
            fields[name] = value[rows.to(value.device)] if isinstance(value, Tensor) else [value[n] for n in rows]
        return Stack(fields, self.constants)

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> Stack:
        """Return the examples with every tensor changed by a function of its name and itself."""
        fields = {name: change(name, x) if isinstance(x, Tensor) else x for name, x in self.fields.items()}
        return Stack(fields, self.constants)

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))


def is_by_kind(batches: Any) -> bool:
    """Return whether these are batches by the name of their kind, and not one batch that is a dict."""
    if not isinstance(batches, Mapping) or any(isinstance(each, Tensor) for each in batches.values()):
        return False
    return any(map(_holds_batches, batches.values()))


def _holds_batches(given: Any) -> bool:
    if isinstance(given, list | tuple):
        return bool(given) and isinstance(given[0], Mapping | Tensor | tuple | list)
    return isinstance(given, Iterable) and not isinstance(given, str | bytes | np.ndarray)


def read_batches(batches: Any, name: str) -> tuple[list[Stack], tuple[str, ...], type]:
    """Return a split that the user gave as one stack per batch, the names of the parts of a batch, and its type."""
    if isinstance(batches, Mapping | Tensor):
        batches = [batches]
    once = isinstance(batches, Iterator)
    if not isinstance(batches, Iterable):
        raise ValueError(f"{name}: is a {type(batches).__name__}, must be a list of batches or a DataLoader")
    batches = list(batches)
    given = [as_dict(batch, name) for batch in batches]
    if not given:
        hint = "; an iterator can be read only once, so give each split its own" if once else ""
        raise ValueError(f"{name}: holds no batches, must be a list of them{hint}")
    form = dict if isinstance(batches[0], Mapping) else tuple if isinstance(batches[0], tuple | list) else Tensor
    stacks = [stack_of(batch, name) for batch in given]
    tensors = tensor_names(stacks[0])
    if any(tensor_names(stack) != tensors for stack in stacks) or not tensors:
        has = ", ".join(key for key in given[0] if key in tensors) or "none"
        raise ValueError(f"{name}: every batch must have the same tensors, one or more; the first has {has}")
    return stacks, tuple(given[0]), form


def tensor_names(stack: Stack) -> set[str]:
    return {key for key, value in stack.fields.items() if isinstance(value, Tensor)}


def as_dict(batch: Any, name: str) -> dict[str, Any]:
    """Return the parts of a batch by name, or by number. Raises ValueError, which names the split, for no batch."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, Tensor):
        return {"0": batch}
    if isinstance(batch, tuple | list):
        return {str(i): value for i, value in enumerate(batch)}
    raise ValueError(f"{name}: a batch is a {type(batch).__name__}, must be a dict, a tuple or a tensor")


def stack_of(batch: Mapping[str, Any], name: str) -> Stack:
    """Return one batch. Raises ValueError for tensors that do not have one row per example."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    rows = {len(value) if value.dim() else None for value in tensors.values()}
    if tensors and (len(rows) != 1 or None in rows):
        shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in tensors.items())
        raise ValueError(f"{name}: every tensor of a batch must have a row per example, here are {shapes}")
    if rows == {0}:
        raise ValueError(f"{name}: a batch holds no example, must hold one or more")
    for key, value in batch.items():
        if key not in tensors and next(tensors_in(value), None) is not None:
            raise ValueError(
                f"{name}: {key} is a {type(value).__name__} with tensors in it, must be a tensor; give each of them a"
                " name of its own, and call=lambda model, batch: ... puts them together"
            )
        if key == DENSE or str(key).startswith(CORRUPT):
            raise ValueError(f"{name}: {key!r} is a name that mhaprune uses itself, must be another")
    lists = {key: value for key, value in batch.items() if isinstance(value, list) and {len(value)} == rows}
    fields = {key: value for key, value in batch.items() if key in tensors or key in lists}
    return Stack(fields, {key: value for key, value in batch.items() if key not in fields})


def joined(columns: Sequence[Any]) -> Column:
    if len(columns) == 1:
        return columns[0]
    return (
        torch.cat(list(columns)) if isinstance(columns[0], Tensor) else [each for column in columns for each in column]
    )


def equal(one: Any, other: Any) -> bool:
    """Return whether two values of batches are equal; False where that cannot be told."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # of a class that may be anybody's
        return False
