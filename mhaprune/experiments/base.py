"""What an experiment is given and what it gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import pandas as pd

from mhaprune.heads import HeadGrid
from mhaprune.model.gates import Gate
from mhaprune.model.transformer import Seq2Seq
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

    `history` is the table that its `training` left, `steps_since` how many steps it was trained after that; `remember`
    is the cache of what was computed for this very model; `gate` is what its gates were made from, `retrain` gives the
    model that the same training makes with another gate, and its history; `example` are the symbols of a source that
    the user brought.
    """

    subject: Seq2Seq
    task: Task
    splits: Splits
    history: pd.DataFrame
    scorers: Mapping[str, Scorer]
    schedules: Mapping[str, Schedule]
    recoveries: Mapping[str, Recovery]
    training: Training
    steps_since: int
    seed: int
    remember: Remember
    save: Save
    gate: Gate | None
    retrain: Callable[[Gate], tuple[Seq2Seq, pd.DataFrame]]
    example: Sequence[str] | None = None


@dataclass(frozen=True)
class Findings:
    """Tidy tables by name, from which figures and words are made; `checks` are proofs, for `status.json`; `files` are
    what else the run writes."""

    tables: dict[str, pd.DataFrame]
    checks: dict[str, float] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment(ABC):
    """A study of one trained model."""

    @abstractmethod
    def __call__(self, study: Study) -> Findings: ...

    recovers: ClassVar[bool] = False  # whether it has a use for recoveries
    reads_example: ClassVar[bool] = False  # and for an example of the user's

    def check(self, grid: HeadGrid, scorers: Mapping[str, Scorer], schedules: Mapping[str, Schedule]) -> None:
        """Raise ValueError, before anything is trained, for settings that do not fit the heads, scorers or
        schedules."""
        return


@dataclass(frozen=True)
class WithinTolerance(Experiment):
    """A study of what can go at a loss of at most `tolerance` of exact match, and how fast the model is then: a latency
    is that of one greedy decoding of `latency_batch` examples, `latency_rounds` times in turn with the dense model."""

    tolerance: float = 0.01
    latency_batch: int = 32
    latency_rounds: int = 20

    def __post_init__(self) -> None:
        for name in ("latency_batch", "latency_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be 1 or more")
        if not 0 <= self.tolerance <= 1:
            raise ValueError(f"tolerance={self.tolerance}: must be from 0 to 1")


def the_one(schedules: Mapping[str, Schedule]) -> Schedule:
    """Of an experiment that knows one schedule only; raises ValueError for more or none."""
    if len(schedules) != 1:
        raise ValueError(f"schedule=[{','.join(schedules)}]: must be one here; experiment=prune compares several")
    return next(iter(schedules.values()))
