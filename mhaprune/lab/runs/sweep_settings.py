"""The settings that do not change the result of a run: how a sweep is done, the files of figures, and who is told."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated

from mhaprune.lab.reporting.figure_settings import FigureSettings
from mhaprune.lab.runs.trackers import tracker
from mhaprune.settings.ranges import Checked, Gt

LONGEST = 100
"""Largest number of characters in the name of a sweep or of a job's folder; file systems allow 255 bytes."""


@dataclass(frozen=True)
class SweepSettings(Checked):
    """The settings of a sweep: its name, and the way its jobs are done. All but `sweep` also apply to a single run."""

    sweep: str | None = None
    """The name of a sweep, with -m. Its folder is `results/sweeps/NAME`. Started again, it does what is left to do."""
    time_limit: Annotated[float | None, Gt(0)] = None
    """The seconds after which a run or job is stopped. It counts as failed. The same command goes on from there."""
    figure: FigureSettings = field(default_factory=FigureSettings)
    """The files of figures."""
    on_results: str | None = None
    """A function of a plug-in, as MODULE.FUNCTION, that is called with the tables and figures of each run, by name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_results is not None:
            tracker(self.on_results)
        name = self.sweep
        if name is not None and (not re.fullmatch(rf"[^./\\][^/\\]{{,{LONGEST - 1}}}", name) or not name.isprintable()):
            raise ValueError(
                f"sweep={name!r}: must be the name of a folder in results/sweeps, without slashes and not"
                f" beginning with a dot, of at most {LONGEST} characters"
            )


def first_part(override: str) -> str:
    """Return the first part of the key of an override: `model` of `+model.d_model=8`."""
    return re.split(r"[./=@]", override.lstrip("+~"))[0]


def deciding(overrides: Iterable[str]) -> list[str]:
    """Return the overrides that decide the result of a job, sorted."""
    return sorted(one for one in overrides if first_part(one) not in COMMON)


SWEEP_SETTINGS = tuple(each.name for each in fields(SweepSettings))
"""The names of the settings of a sweep."""
COMMON = ("cache", "launch", *SWEEP_SETTINGS)
"""Settings that are the same for all jobs of a sweep, because no result depends on them."""
