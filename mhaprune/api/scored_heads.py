"""Wrapped heads as budgets, promises and timing see them: `Heads` without the methods that these serve."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import ref

import pandas as pd
from torch import nn

from mhaprune.heads import BlockId, HeadMask
from mhaprune.saving.folders import make_plain
from mhaprune.scorers.scoring import Scoring
from mhaprune.surgery.bare_weights import make_parameters
from mhaprune.wrapping.build import ModelWithData


@dataclass
class Promised:
    """Notes on the pruned copies of one model: promises of speed, trainings, the last copy, and the times that
    the costs of units come from."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """See `Heads.promises`."""
    curves: list[pd.DataFrame] = field(default_factory=list)
    """The histories of trainings, see `Heads.trainings`."""
    pruned: ref[nn.Module] | None = None
    """The model that was handed out last, while somebody holds it."""
    warned: bool = False
    """Whether it was said that all examples are of one kind."""
    times: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The milliseconds without half of the units of a site, and the sites that save less time than timing varies, by
    what decides them."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"pruned": None}


@dataclass(frozen=True, repr=False, eq=False)
class ScoredHeads(ModelWithData):
    """A wrapped model with its scores. For the methods see `Heads`."""

    @cached_property
    def scoring(self) -> Scoring:
        """The scores on the *score* split. Each score is computed only once."""
        return Scoring(self.subject, self.splits.score, self.seed)

    @cached_property
    def promised(self) -> Promised:
        return Promised()

    def handed_out(self, model: nn.Module) -> nn.Module:
        """Return a pruned model as the user gets it, and remember it as the last one. Warns if it is larger."""
        make_parameters(model)
        make_plain(model)
        before, now = (sum(weight.numel() for weight in each.parameters()) for each in (self.subject.model, model))
        if now > before:
            warnings.warn(
                f"prune: the model has {now} weights now, {before} before, because heads that shared keys and values"
                ' have their own; unit="group" removes whole groups',
                stacklevel=3,
            )
        self.promised.pruned = ref(model)
        return model

    def must_stay(self) -> dict[BlockId, int]:
        """Return how many units of each block must stay: those that cannot be removed, and two where it `meets`."""
        blocks = zip(self.grid.blocks, self.grid.sizes, self.subject.blocks, strict=True)
        return {name: n if name in self.proven.stuck else min(n, 2 * block.meets) for name, n, block in blocks}

    @abstractmethod
    def units(self, unit: Any) -> ScoredHeads:
        """Return these heads as sets that are closed and removed together."""

    @abstractmethod
    def masks(
        self, keep: Sequence[float | int] | None = None, by: Any = None, schedule: Any = None, **budget: Any
    ) -> list[HeadMask]:
        """Return a mask for each of several sizes."""

    @abstractmethod
    def cache_bytes(self, mask: Any = None, batch_size: int = 1, length: int = 1) -> int:
        """Return the bytes of keys and values of a batch, without the heads of a mask."""
