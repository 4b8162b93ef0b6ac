"""The input of experiments and recoveries: a model, its data and its settings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pandas as pd

from mhaprune.data import Splits
from mhaprune.heads import HeadGrid
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.storage.cache import Remember, no_memory
from mhaprune.subject import Subject
from mhaprune.training.fine_tuning import FINE_TUNING
from mhaprune.training.loop import Descent
from mhaprune.wrapping.build import ModelWithData

Made = TypeVar("Made")


@dataclass(frozen=True)
class Known:
    """The work of the heads of a model, where that is known."""

    roles: Mapping[str, str]
    """What a head does, by its name. Heads without a name do nothing of note."""
    useful: Sequence[str]
    """The roles of the heads that matter."""
    source: str
    """Where it is known from: `construction`, `publication` or `alignment`."""


@dataclass(frozen=True)
class Study:
    """A model, its data and its settings, in one form for trained and pretrained models."""

    subject: Subject
    """The dense model."""
    splits: Splits[Any]
    training: Descent
    """The settings of training; for a pretrained model, the settings of fine-tuning."""
    seed: int
    """The seed of the run."""
    extra_steps: int = 0
    """The largest number of training steps that a model of the run gets after the steps of `training`."""
    remember: Remember = no_memory
    """The cache of results for exactly this model; by default nothing is kept."""
    saved: Callable[..., dict[str, bytes]] = lambda name, model, steps=0: {}
    """A function that takes a name, a model and its number of training steps since the training of this study. It
    returns the files of the saved model by their paths; none by default."""
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    recoveries: Mapping[str, Any] = field(default_factory=dict)
    """Each a `Recovery`."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Columns for every table that name the quality, the loss and the timed call. Empty for mhaprune's own tasks."""
    tokens: Callable[[Any], list[list[str]]] | None = None
    """A function that returns the tokens of each example of a batch as texts; None if the tokens are not known."""
    task: Any = None
    """The `Task` that the model was trained on; None for a pretrained model."""
    whole_grid: HeadGrid | None = None
    """All heads of the model before any removal; None if these are the heads of `subject`."""
    history: pd.DataFrame = field(default_factory=pd.DataFrame)
    """The table of the model's training; empty for a pretrained model."""
    trained_with: Mapping[str, Any] = field(default_factory=dict)
    """The threads, device and version of torch that trained the model; empty if they are not known."""
    example: Sequence[str] | None = None
    """The symbols of the user's own source sequence; None without one."""
    known: Known | None = None
    """The heads whose work is known; None for a model that names none."""
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, model: ModelWithData, remember: Remember = no_memory) -> Study:
        """Return the study of a wrapped model."""
        return cls(model.subject, model.splits, FINE_TUNING, model.seed, remember=remember, words=model.words)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of `make()`. It is computed once per key and shared by all models of the run."""
        if key not in self._memo:
            self._memo[key] = make()
        made: Made = self._memo[key]
        return made

    @property
    def training_table(self) -> dict[str, pd.DataFrame]:
        """The history as the table `training`, with the quality at which the task counts as learnt; empty for a
        pretrained model."""
        if self.task is None or self.history.empty:
            return {}
        return {"training": self.history.assign(learnt=self.task.learnt)}
