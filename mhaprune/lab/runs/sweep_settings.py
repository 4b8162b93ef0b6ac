"""The settings that do not change the result of a run: how a sweep is done, and the files of figures."""

import re
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from mhaprune.lab.reporting.figure_settings import FigureSettings
from mhaprune.settings.ranges import Checked, Gt, Within

LONGEST = 100
"""Largest number of characters in the name of a sweep or job; file systems allow 255 bytes."""


@dataclass(frozen=True)
class SweepSettings(Checked):
    """The settings of a sweep: its name, and the way its jobs are done. `time_limit` and `figure` also apply to a
    single run."""

    sweep: str | None = None
    """The name of a sweep, with -m. Its folder is `results/sweeps/NAME`. A restart does only the unfinished jobs."""
    on_change: Literal["refuse", "redo"] = "refuse"
    """The reaction to jobs that were done with other settings or other code: `refuse` the sweep, or do these jobs again
    (`redo`)."""
    on_failure: Literal["continue", "stop"] = "continue"
    """After a failed job, `continue` starts the next jobs, and `stop` starts none."""
    retries: Annotated[int, Within(0, 100)] = 0
    """The number of times that the same command tries a failed job again. A job with a wrong setting is not tried
    again."""
    max_jobs: Annotated[int, Within(1, 1_000_000)] = 10_000
    """The largest number of jobs in a sweep, so that a typing error does not fill the memory."""
    time_limit: Annotated[float | None, Gt(0)] = None
    """The seconds after which a job is stopped. The stopped job counts as failed. The next try continues where the job
    stopped."""
    figure: FigureSettings = field(default_factory=FigureSettings)
    """The files of figures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.sweep
        if name is not None and (not re.fullmatch(rf"[^./\\][^/\\]{{,{LONGEST - 1}}}", name) or not name.isprintable()):
            raise ValueError(
                f"sweep={name!r}: must be the name of a folder in results/sweeps, without slashes and not"
                f" beginning with a dot, of at most {LONGEST} characters"
            )


SWEEP_SETTINGS = tuple(each.name for each in fields(SweepSettings))
"""The names of the settings of a sweep."""
