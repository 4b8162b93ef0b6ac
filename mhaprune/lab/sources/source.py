"""The source of a run's model and examples: a model that is trained here, or a pretrained one."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mhaprune.data import Data, Splits
from mhaprune.heads import HeadGrid
from mhaprune.inputs import Study
from mhaprune.measure.times import device_name
from mhaprune.recoveries.base import Recovery
from mhaprune.scorers.base import Scorer
from mhaprune.storage.cache import Cache


@dataclass(frozen=True, kw_only=True)
class ModelSource(ABC):
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
