"""The input of an experiment, and its sources: a model that is trained here, or a pretrained one."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mhaprune.data import Data, Examples, Splits
from mhaprune.heads import HeadGrid
from mhaprune.measure.times import device_name
from mhaprune.model.training import Training
from mhaprune.recoveries.base import Recovery, RecoveryContext
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.storage.cache import Cache, Remember
from mhaprune.subject import Subject
from mhaprune.tasks.base import Task
from mhaprune.wrapping.descent import Descent

if TYPE_CHECKING:
    from mhaprune.model.transformer import Seq2Seq


@dataclass(frozen=True)
class Trained:
    """The parts of a study that only a model of mhaprune has. Experiments that need them set `needs_training`."""

    network: Seq2Seq
    task: Task
    splits: Splits[Examples]
    training: Training
    save: Callable[..., bytes]
    """A function that takes a model and its number of training steps since the training of this study, and returns the
    content of a file that `model_file` loads."""
    example: Sequence[str] | None = None
    """The symbols of the user's own source sequence; None without one."""


@dataclass(frozen=True)
class Study:
    """The input of an experiment: a model, its data and its settings, in one form for trained and pretrained models."""

    subject: Subject
    whole_grid: HeadGrid
    """All heads of the model before any removal; for a pretrained model, the heads of `subject`."""
    splits: Splits[Data]
    training: Descent
    """The settings of training; for a pretrained model, the settings of fine-tuning."""
    seed: int
    remember: Remember
    """The cache of results for exactly this model."""
    saved: Callable[..., dict[str, bytes]] = lambda name, model, steps=0: {}
    """A function that takes a name, a model and its number of training steps since the training of this study. It
    returns the files of the saved model by their paths; none by default."""
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    recoveries: Mapping[str, Recovery] = field(default_factory=dict)
    history: pd.DataFrame = field(default_factory=pd.DataFrame)
    """The table of the model's training; empty for a pretrained model."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Columns for every table that name the quality, the loss and the timed call. Empty for mhaprune's own tasks."""
    tokens: Callable[[Any], list[list[str]]] | None = None
    """A function that returns the tokens of each example of a batch as texts; None if the tokens are not known."""
    trained_with: Mapping[str, Any] = field(default_factory=dict)
    """The threads, device and version of torch that trained the model; empty if they are not known."""
    origin: Trained | None = None
    """The parts that only a model trained by mhaprune has; None for a pretrained model."""
    steps_since: int = 0
    """Number of training steps that the model already had in recoveries, after `training`."""

    @property
    def trained(self) -> Trained:
        """The parts that only a model trained by mhaprune has, for an experiment with `needs_training`."""
        assert self.origin is not None, "the experiment says that it needs no training"
        return self.origin

    def lesson(self, extra_steps: int = 0) -> RecoveryContext:
        """Return the input of a recovery. `extra_steps` are the most training steps that recoveries still add to a
        model."""
        return RecoveryContext(self.subject, self.training, self.splits, self.seed, self.steps_since + extra_steps)

    @property
    def training_table(self) -> dict[str, pd.DataFrame]:
        """The history as the table `training`, with the quality at which the task counts as learnt; empty for a
        pretrained model."""
        if self.origin is None or self.history.empty:
            return {}
        return {"training": self.history.assign(learnt=self.origin.task.learnt)}


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """The source of a run's model and examples. It can be examined before anything slow is computed."""

    seed: int
    device: str
    num_threads: int
    cache: str

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in titles."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Columns of every table that identify the source of a row, for example its task and its seed."""

    @property
    @abstractmethod
    def decisive(self) -> dict[str, Any]:
        """Facts that change the results but are not settings, such as a digest of the weights.

        In the fingerprint of the run, a fact replaces the setting of the same name.
        """

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Further facts for the report."""

    @property
    @abstractmethod
    def grid(self) -> HeadGrid:
        """The heads that the model has or will have."""

    @property
    @abstractmethod
    def splits(self) -> Splits[Data]:
        """The examples, on the device of the model."""

    @abstractmethod
    def usable(self, scorers: Mapping[str, Scorer], recoveries: Mapping[str, Recovery]) -> tuple[Any, Any]:
        """Return supported scorers and recoveries; log others. Raises ValueError if no scorer or no recovery is
        left."""

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError for settings that are not possible. The check is fast."""

    def prepare(self) -> None:
        """Raise ValueError for data that are not allowed and for a cache that cannot be written."""
        assert len(self.splits.report)
        Cache(self.cache)

    @abstractmethod
    def study(self, facts: Mapping[str, Any]) -> Study:
        """Return the input of an experiment, with the model ready. `facts` are stored in the files of saved models."""

    @property
    def packages(self) -> Sequence[str]:
        """The packages that the model needs, beside `PACKAGES`."""
        return ()

    def environment(self) -> dict[str, Any]:
        """Return the content of `environment.json`: command, commit, machine and versions."""
        versions = {name: version(name) for name in (*PACKAGES, *self.packages)}
        return {
            "command": shlex.join(["python", *sys.argv]),
            "git_commit": _git_commit(),
            "seed": self.seed,
            "num_threads": self.num_threads,
            "device": device_name(self.device),
            "versions": {"python": platform.python_version(), **versions},
        }


PACKAGES = ("mhaprune", "torch", "hydra-core", "pandas", "numpy", "matplotlib")


def _git_commit() -> str | None:
    """Return the commit of the working copy that this package is imported from, with `+` if it has changes; None
    outside git."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    commit = ["describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.check_output([*git, *commit], stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
