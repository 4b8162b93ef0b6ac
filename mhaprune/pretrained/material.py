"""What has to be read before a model that others made can be studied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from mhaprune.adapters.losses import Judge

BATCH = 32
"""Number of texts that are filled up to the same length, and of examples in a batch."""


class Objective(NamedTuple):
    """What a model is judged by, see `adapters.losses`."""

    loss: Judge
    quality: Judge | None = None
    """None is what goes with the loss."""


class Material(NamedTuple):
    """A model, its examples, and what judges it."""

    model: nn.Module
    splits: Mapping[str, Sequence[Any]]
    """The batches of `score`, `choose`, `report` and, if a recovery has texts of its own, `train`."""
    objective: Objective
    facts: Mapping[str, str]
    """What tells its runs apart from those of other models, tasks and objectives."""
    packages: Sequence[str]
    """What the model needs, for the environment of the run."""
    call: Callable[[nn.Module, Any], Any] | None = None
    """How the model is called, if not in the usual way."""
    tokens: Callable[[Any], list[list[str]]] | None = None
    """Returns the tokens of each example of a batch, as a person reads them."""
    saves: bool = False
    """Whether pruned models are saved."""


def batched(rows: Sequence[Any]) -> list[Sequence[Any]]:
    """The rows in batches."""
    return [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]


def chosen(objective: str | None, known: Mapping[str, Objective], whose: str) -> tuple[str, Objective]:
    """The objective of that name; without a name the first one. Raises ValueError for a name that is not known."""
    name = objective or next(iter(known))
    if name not in known:
        raise ValueError(f"objective={name}: {whose} is judged by {' or '.join(known)}")
    return name, known[name]
