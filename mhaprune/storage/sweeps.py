"""A sweep as a folder: its list of jobs, written before the first one starts, and the folder of each."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from mhaprune.settings.ranges import Checked, Gt, Within
from mhaprune.storage.locks import read_bytes
from mhaprune.storage.store import fingerprint, make_folder, write_json

FILE = "sweep.json"
"""The list of the jobs in the folder of a sweep."""
LOCK = ".sweep.lock"
"""What the process holds that starts the jobs."""
STOP = ".stop"
"""The file that says to later jobs that they should not start."""
LONGEST = 100
"""Characters of a name, of which file systems allow 255 bytes."""


@dataclass(frozen=True)
class Search(Checked):
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
class Orders(Checked):
    """How jobs are done. None of it changes what they find."""

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

    search: Search | None = None
    """Whether the settings of a sweep are searched, and for what. None does all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sweep is not None and (
            not self.sweep.isprintable()
            or re.search(r"[/\\]", self.sweep)
            or self.sweep.startswith(".")
            or not 0 < len(self.sweep) <= LONGEST
        ):
            raise ValueError(
                f"sweep={self.sweep!r}: must be the name of a folder in results/sweeps, without slashes and not"
                f" beginning with a dot, of at most {LONGEST} characters"
            )


ORDERS = tuple(field.name for field in fields(Orders))


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str
    """Of its folder: what tells it apart from the other jobs, and a fingerprint of that."""
    label: str
    """What tells it apart, in full."""
    overrides: list[str]
    """All its settings as they were typed."""


@dataclass(frozen=True)
class Sweep:
    """What the file says."""

    varies: list[str]
    """The settings in which jobs differ."""
    given: str
    """A fingerprint of all other settings, and of the files that settings come from."""
    starts: int
    """How often the sweep was started. Jobs of one start were timed beside each other."""
    command: str
    """The command that started it."""
    jobs: list[Job]

    @classmethod
    def read(cls, folder: Path) -> Sweep | None:
        """The sweep in a folder, or None. Raises ValueError for a file that holds something else."""
        try:
            content = json.loads(read_bytes(folder / FILE))
            sweep = cls(**content | {"jobs": [Job(**job) for job in content["jobs"]]})
            texts = [*sweep.varies, sweep.given, sweep.command]
            texts += [text for job in sweep.jobs for text in (job.name, job.label, *job.overrides)]
            if not all(isinstance(text, str) for text in texts) or not isinstance(sweep.starts, int):
                raise TypeError
            if any(len(job.name.encode()) > 255 or "\0" in job.name for job in sweep.jobs):
                raise TypeError
            "".join(texts).encode()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"{folder / FILE}: damaged, it must list the jobs of a sweep") from None
        return sweep

    def and_jobs(self, settings: Sequence[Sequence[str]]) -> Sweep:
        """The sweep with further jobs."""
        jobs = {job.name: job for job in (*self.jobs, *(_job(own, self.varies) for own in settings))}
        return replace(self, jobs=list(jobs.values()))

    def tells(self, override: str) -> bool:
        """Whether jobs differ in the setting of this override."""
        return _key(override) in self.varies

    def job(self, name: str) -> Job:
        return next(job for job in self.jobs if job.name == name)


def begin(
    folder: Path, place: str, settings: Sequence[Sequence[str]], sources: object, varying: Sequence[str] = ()
) -> tuple[Sweep, Sweep | None]:
    """The sweep of jobs with these settings, and what the folder held of it before.

    `sources` are what else decides the settings, `varying` those that later jobs may change. Raises ValueError for a
    folder that holds something else; `place` is the setting that names the folder.
    """
    before = Sweep.read(folder)
    if before is None and folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
        raise ValueError(f"{place}: its folder is not empty and holds no sweep, name another")
    different = sorted({*_varying(settings), *varying})
    varies = different
    if before is not None:
        if not set(different) <= set(before.varies) <= {_key(one) for one in settings[0]}:
            raise ValueError(
                f"{place}: holds another sweep, over {', '.join(before.varies) or 'nothing'}; this one is over"
                f" {', '.join(different) or 'nothing'}, name another"
            )
        varies = before.varies
    fixed = [
        one for one in settings[0] if _key(one) not in varies and _key(one).split(".")[0] not in (*ORDERS, "cache")
    ]
    jobs = {job.name: job for job in (_job(own, varies) for own in settings)}
    given = fingerprint([sorted(fixed), sources])
    command = shlex.join(["python", *sys.argv])
    starts = 1 if before is None else before.starts + 1
    return Sweep(varies, given, starts, command, list(jobs.values())), before


def write(folder: Path, sweep: Sweep) -> None:
    write_json(make_folder("hydra.sweep.dir", folder) / FILE, asdict(sweep))


def _varying(settings: Sequence[Sequence[str]]) -> list[str]:
    texts: dict[str, set[str]] = {}
    for own in settings:
        for one in own:
            texts.setdefault(_key(one), set()).add(one)
    return sorted(key for key, different in texts.items() if len(different) > 1)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _job(overrides: Sequence[str], varies: Sequence[str]) -> Job:
    own = sorted(one for one in overrides if _key(one) in varies)
    readable = "-".join(re.sub(r"[^\w.-]+", "_", one, flags=re.ASCII).strip("_") for one in own) or "job"
    return Job(f"{readable[: LONGEST - 13]}-{fingerprint(own)}", ", ".join(own) or "the only job", list(overrides))
