"""Tensors that a dataset reads when they are used, for splits that are too large for memory.

Dimensions: E = examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

LARGE = 2**30
"""The bytes of a split from which on it is read on demand. A smaller one is read once, which is faster."""


@dataclass(frozen=True, eq=False)
class OnDemand(Mapping[str, Tensor]):
    """Tensors by name. They are read when one of them is used; a selection of examples reads only these."""

    read: Callable[[list[int]], Mapping[str, Tensor]]
    """Reads and collates the examples at these positions of the dataset."""
    at: Tensor
    """(E,): the positions of the examples."""
    names: tuple[str, ...]
    added: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors in memory, such as the output of the dense model."""

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        tensors = self.read(self.at.tolist())
        return {name: self.added[name] if name in self.added else tensors[name] for name in self.names}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __reduce__(self) -> tuple[type, tuple[dict[str, Tensor]]]:
        return dict, (dict(self),)  # another process gets the tensors, not the dataset

    def select(self, index: slice | Tensor) -> OnDemand:
        """Return the tensors of some of the examples; `index` is on the CPU."""
        return replace(self, at=self.at[index], added={name: value[index] for name, value in self.added.items()})

    def plus(self, name: str, value: Tensor) -> OnDemand:
        """Return the tensors with one more."""
        return replace(self, names=(*self.names, name), added={**self.added, name: value})


def readings(loader: Any, name: str) -> tuple[Iterator[Any], Callable[[list[int]], Mapping[str, Any]], Tensor] | None:
    """Return the batches of a large loader, read one by one and without their numbers; a function that reads examples
    again, by their positions in the dataset; and these positions in the order of the batches.

    Return None for a small split, and for one that differs when it is read again.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or not loader.batch_sampler:
        return None
    dataset, collate = loader.dataset, loader.collate_fn

    def read(at: list[int]) -> Mapping[str, Any]:
        return as_dict(collate([dataset[n] for n in at]), name)

    with torch.random.fork_rng(devices=[]):  # a small split is then shuffled as if this had not looked
        order = [[*positions] for positions in loader.batch_sampler]
        first = [[x for x in read(at).values() if isinstance(x, Tensor)] for at in order[:1] * 2]
    large = bool(order) and sum(x.nbytes for x in first[0]) * len(order) >= LARGE
    if not large or not all(map(torch.equal, *first)):
        return None
    again = DataLoader(dataset, batch_sampler=order, collate_fn=collate, num_workers=loader.num_workers)
    return map(_empty, again), read, torch.tensor([n for positions in order for n in positions])


def as_dict(batch: Any, name: str) -> Mapping[str, Any]:
    """Return the parts of a batch by name, or by number. Raises ValueError, which names the split, for no batch."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, Tensor):
        return {"0": batch}
    if isinstance(batch, tuple | list):
        return {str(i): value for i, value in enumerate(batch)}
    raise ValueError(f"{name}: a batch is a {type(batch).__name__}, must be a dict, a tuple or a tensor")


def _empty(batch: Any) -> Any:
    """Return a batch in the same form, with tensors that have shapes and no numbers."""
    if isinstance(batch, Mapping):
        return {key: _empty(value) if isinstance(value, Tensor) else value for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_empty(value) if isinstance(value, Tensor) else value for value in batch)
    return batch.to("meta") if isinstance(batch, Tensor) else batch
