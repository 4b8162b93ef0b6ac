"""The settings of a sweep: how its jobs are done, and how they are searched. None of them changes what a job finds."""

import re
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from mhaprune.settings.ranges import Checked, Gt, Within

LONGEST = 100
"""Characters of a name, of which file systems allow 255 bytes."""


@dataclass(frozen=True)
class SearchSettings(Checked):
    """A sweep whose jobs are chosen by what earlier ones found."""

    column: str = "training.valid_quality"
    """What is searched for, as `TABLE.COLUMN`: a column of numbers of a table that every run leaves."""
    row: Literal["last", "max", "min", "mean"] = "last"
    """Which row of that column counts: the last one, or that with the largest or smallest number; or their mean."""
    goal: Literal["maximize", "minimize"] = "maximize"
    """Which end is better."""
    trials: Annotated[int, Within(1, 100_000)] = 20
    """How many jobs there are."""
    at_once: Annotated[int, Within(1, 1000)] = 1
    """How many jobs are proposed together, before any of them is done."""


@dataclass(frozen=True)
class SweepSettings(Checked):
    """The settings that say how jobs are done; `time_limit` also holds for a single run."""

    sweep: str | None = None
    """The name of a sweep, with -m. Its folder is `results/sweeps/NAME`. Started again it does what is left to do."""
    on_change: Literal["refuse", "redo"] = "refuse"
    """What happens to jobs that were done with other settings or other code."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Whether the jobs after a failed one are started."""
    retries: Annotated[int, Within(0, 100)] = 0
    """How often a failed job is tried again at once."""
    max_jobs: Annotated[int, Within(1, 1_000_000)] = 10_000
    """The most jobs that a sweep may have, so that a slip of the hand does not fill the memory."""
    time_limit: Annotated[float | None, Gt(0)] = None
    """The seconds after which a job is stopped. It counts as failed, and goes on from there when it is tried again."""
    search: SearchSettings | None = None
    """Whether the settings of a sweep are searched, and for what. None does all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.sweep
        if name is not None and (not re.fullmatch(rf"[^./\\][^/\\]{{,{LONGEST - 1}}}", name) or not name.isprintable()):
            raise ValueError(
                f"sweep={name!r}: must be the name of a folder in results/sweeps, without slashes and not"
                f" beginning with a dot, of at most {LONGEST} characters"
            )


SWEEP_SETTINGS = tuple(field.name for field in fields(SweepSettings))
"""The names of these settings."""
