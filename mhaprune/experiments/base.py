"""What an experiment is given and what it gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Protocol

import pandas as pd

from mhaprune.heads import HeadGrid
from mhaprune.model.gates import Gate
from mhaprune.model.transformer import Seq2Seq
from mhaprune.ranges import Checked, Ge, Within
from mhaprune.recoveries.base import Recovery
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.scoring import Remember
from mhaprune.tasks.base import Splits, Task
from mhaprune.training import Training


class Save(Protocol):
    def __call__(self, one: Seq2Seq, steps: int = 0) -> bytes:
        """The content of a file from which `model_file` reads a model of this task back; `steps` were trained after the
        study's own."""
        ...


@dataclass(frozen=True)
class Study:
    """A trained model and all that an experiment may do with it.

    It exists so that an experiment does not know a `Run`: neither where the model came from nor where results go.
    """

    subject: Seq2Seq
    """The trained model."""
    task: Task
    """What the model has learnt."""
    splits: Splits
    """The examples of the task."""
    history: pd.DataFrame
    """The table that the training left: one row per evaluation."""
    scorers: Mapping[str, Scorer]
    """The scorers of the run, by name."""
    schedules: Mapping[str, Schedule]
    """The schedules of the run, by name."""
    recoveries: Mapping[str, Recovery]
    """The recoveries of the run, by name."""
    training: Training
    """How the model was trained."""
    steps_since: int
    """Number of steps that the model was trained after `training`, as a model that was fine-tuned and saved is."""
    seed: int
    """The seed of the run."""
    remember: Remember
    """The cache of what was computed for this model."""
    save: Save
    """Returns a model as the content of a file."""
    gate: Gate | None
    """What the learned gates were made from. None means a model without gates."""
    retrain: Callable[[Gate], tuple[Seq2Seq, pd.DataFrame]]
    """Returns the model that the same training makes with another gate, and its history."""
    example: Sequence[str] | None = None
    """The symbols of a source that the user brought."""


@dataclass(frozen=True)
class Findings:
    """What an experiment returns. It writes nothing itself."""

    tables: dict[str, pd.DataFrame]
    """Tidy tables by name. Figures and sentences are made from them."""
    checks: dict[str, float] = field(default_factory=dict)
    """Proofs by name, for `status.json`."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents of further files, by their path in the run folder."""


@dataclass(frozen=True)
class Experiment(Checked, ABC):
    """A study of one trained model."""

    @abstractmethod
    def __call__(self, study: Study) -> Findings: ...

    recovers: ClassVar[bool] = False
    """Whether it uses recoveries."""
    reads_example: ClassVar[bool] = False
    """Whether it uses an example of the user's own."""

    def check(self, grid: HeadGrid, scorers: Mapping[str, Scorer], schedules: Mapping[str, Schedule]) -> None:
        """Raise ValueError, before anything is trained, for settings that do not fit the heads, scorers or
        schedules."""
        return


@dataclass(frozen=True)
class WithinTolerance(Experiment):
    """A study of which heads can go at a small loss of exact match, and how fast the model is then.

    A latency is the time of one greedy decoding, in turn with the dense model.
    """

    tolerance: Annotated[float, Within(0, 1)] = 0.01
    """The largest loss of exact match, as a difference of two shares: 0.01 is one percentage point."""
    latency_batch: Annotated[int, Ge(1)] = 32
    """Number of examples of one decoding."""
    latency_rounds: Annotated[int, Ge(1)] = 20
    """Number of decodings of each model."""


def the_one(schedules: Mapping[str, Schedule]) -> Schedule:
    """Of an experiment that knows one schedule only; raises ValueError for more or none."""
    if len(schedules) != 1:
        raise ValueError(f"schedule=[{','.join(schedules)}]: must be one here; experiment=prune compares several")
    return next(iter(schedules.values()))
