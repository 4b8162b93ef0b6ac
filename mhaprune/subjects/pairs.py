"""Pairs of an example and its corrupt counterpart, which are made by their order."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from mhaprune.subjects.batches import Batches

DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""The samplers of torch that draw the order of the examples."""


def paired(score: Any, corrupt: Any) -> Batches:
    """Return the examples of `score` with their counterparts. Raises ValueError, one line, for what cannot be paired,
    and for a loader that does not read the same examples in the same order each time."""
    splits = {name: _in_order(batches, name) for name, batches in (("score", score), ("corrupt", corrupt))}
    return splits["score"].with_corrupt(splits["corrupt"])


def _in_order(batches: Any, name: str) -> Batches:
    found = Batches.of(batches, name)
    if isinstance(batches, Batches | Mapping | Tensor | list | tuple | Iterator):
        return found  # read once, in the order in which it stands
    inside = getattr(batches, "sampler", None), getattr(batches, "batch_sampler", None)
    samplers = [*inside, *(getattr(each, "sampler", None) for each in inside)]
    drawn = any(isinstance(each, DRAWING) or getattr(each, "shuffle", False) for each in samplers)
    if drawn or not _equal(found, Batches.of(_again(batches, name), name)):
        raise ValueError(
            f"{name}: reads its examples in a random order, so they cannot be paired; must have shuffle=False with"
            " corrupt="
        )
    return found


def _again(batches: Iterable[Any], name: str) -> list[Any]:
    if not (second := list(batches)):
        raise ValueError(f"{name}: can be read only once, must be a list of batches")
    return second


def _equal(one: Batches, other: Batches) -> bool:
    first, second = one.tensors(), other.tensors()
    return first.keys() == second.keys() and all(
        first[name].shape == second[name].shape and torch.equal(first[name], second[name]) for name in first
    )
