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
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from mhaprune.attention.gates import GateConfig
from mhaprune.data import Data, Examples, Splits
from mhaprune.heads import HeadGrid
from mhaprune.measure.times import device_name
from mhaprune.model.training import Training
from mhaprune.recoveries.base import Recovery, RecoveryContext
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.storage.cache import Remember
from mhaprune.subject import Subject
from mhaprune.tasks.base import Task
from mhaprune.wrapping.descent import Descent

if TYPE_CHECKING:
    from mhaprune.model.transformer import Seq2Seq


@dataclass(frozen=True)
class Trained:
    """The parts of a study that only a model trained here has: experiments that need them set `needs_training`."""

    network: Seq2Seq
    task: Task
    splits: Splits[Examples]
    training: Training
    gate: GateConfig | None
    """What the gates of the model were made from."""
    save: Callable[..., bytes]
    """Returns the content of a file from which `model_file` reads a model back; takes the model and the number of steps
    that it was trained after the study's own."""
    retrain: Callable[[GateConfig], tuple[Seq2Seq, pd.DataFrame]]
    """Returns the model that the same training makes with another gate, and its history."""
    example: Sequence[str] | None = None
    """The symbols of a source that the user brought."""


@dataclass(frozen=True)
class Study:
    """The input of an experiment: a model, its data, its settings, the same for models of every source."""

    subject: Subject
    whole_grid: HeadGrid
    """The heads of the unpruned model; of a pretrained one those that are there."""
    splits: Splits[Data]
    training: Descent
    """How the model was trained or, for a pretrained model, how it is trained on."""
    seed: int
    remember: Remember
    """The cache of what was computed for this very model."""
    saved: Callable[..., dict[str, bytes]]
    """Returns the files, by name, from which a model is read back; none for one that is not saved. Takes a name, the
    model and the number of steps that it was trained after the study's own."""
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    recoveries: Mapping[str, Recovery] = field(default_factory=dict)
    history: pd.DataFrame = field(default_factory=pd.DataFrame)
    """The table that the training of the model left; empty for a model that was not trained here."""
    words: Mapping[str, str] = field(default_factory=dict)
    """What tables call the quality, the loss and the call that is timed, by column; without any, as our tasks do."""
    tokens: Callable[[Any], list[list[str]]] | None = None
    """Returns the tokens of each example of a batch as a person reads them; None where they are not known."""
    trained_with: Mapping[str, Any] = field(default_factory=dict)
    """The threads, device and version of torch that trained the model; empty where that is not known."""
    groups: Sequence[str] = ()
    """The group of each example of the report split; empty for a model without a task of ours."""
    origin: Trained | None = None
    """None for a pretrained model."""
    steps_since: int = 0
    """How many steps the model was trained after `training`, by recoveries."""

    @property
    def trained(self) -> Trained:
        """The parts that only a model trained here has, for an experiment with `needs_training`."""
        assert self.origin is not None, "the experiment says that it needs no training"
        return self.origin

    def lesson(self, extra_steps: int = 0) -> RecoveryContext:
        """Return the input of recoveries."""
        return RecoveryContext(self.subject, self.training, self.splits, self.seed, self.steps_since + extra_steps)

    @property
    def training_table(self) -> dict[str, pd.DataFrame]:
        """The history as the table `training`; no table for a model that was not trained here."""
        return {"training": self.history} if len(self.history) else {}


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """The source of the model of a run, with its examples. It is known before anything long is computed."""

    key: ClassVar[str]
    """The settings that say how many examples there are, `task` or `model`."""

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
        """The columns that tell its runs from those of others, in every table."""

    @property
    @abstractmethod
    def decisive(self) -> dict[str, Any]:
        """Facts that change the results but are not settings, such as a digest of the weights.

        A key that is also a setting replaces it in the fingerprint of the run.
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
        """The examples, where the model computes."""

    @abstractmethod
    def sketch(self) -> Subject:
        """A model of the same heads and sizes, whatever its weights: what it costs is known before it is trained."""

    @abstractmethod
    def usable(self, scorers: Mapping[str, Scorer], recoveries: Mapping[str, Recovery]) -> tuple[Any, Any]:
        """Return those that this model can use, and log the others; raises ValueError if none is left."""

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError for what cannot be, in short time."""

    @abstractmethod
    def prepare(self) -> None:
        """Raise ValueError for data and folders that do not fit."""

    @abstractmethod
    def study(self, facts: Mapping[str, Any]) -> Study:
        """The model with all that an experiment may do with it. `facts` go into the files of models that it saves."""

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


def trained_with(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an environment that may change a trained model, and how long training takes."""
    found = {name: environment.get(name) for name in ("num_threads", "device")}
    return found | {"torch": environment.get("versions", {}).get("torch")}


def _git_commit() -> str | None:
    """The commit of the working copy that this package is imported from, with `+` where it has changes; None outside
    git."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], stderr=subprocess.DEVNULL, text=True)
        changes = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changes else "")
