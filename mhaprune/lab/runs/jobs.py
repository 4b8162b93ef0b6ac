"""The list of jobs of a sweep, and the progress of these jobs. The list is a file in the folder of the sweep, written
before the first job starts."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mhaprune.lab.runs.run_folder import read_status
from mhaprune.lab.runs.sweep_settings import LONGEST, SWEEP_SETTINGS
from mhaprune.progress import duration
from mhaprune.storage.locks import is_held, read_bytes
from mhaprune.storage.store import fingerprint, make_folder, write_json

FILE = "sweep.json"
"""The name of the file, in the folder of a sweep, that lists the jobs."""
LOCK = ".sweep.lock"
"""The name of a file in the folder of a sweep. The process that runs the sweep holds a lock on this file."""
STOP = ".stop"
"""The name of a file in the folder of a sweep. If it exists, no further job starts."""
PAUSE = 2.0
"""Seconds between two readings of the folder of a sweep under `--watch`."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str
    """The name of the job's folder: the settings that differ between jobs, shortened, and a fingerprint of them."""
    label: str
    """The settings that differ between jobs, in full."""
    overrides: list[str]
    """All settings of the job as they were typed."""

    @classmethod
    def of(cls, overrides: Sequence[str], varies: Sequence[str]) -> Job:
        """Return the job with these settings. `varies` names the settings in which jobs differ."""
        differing = sorted(one for one in overrides if _key(one) in varies)
        readable = "-".join(re.sub(r"[^\w.-]+", "_", one, flags=re.ASCII).strip("_") for one in differing) or "job"
        return cls(
            f"{readable[: LONGEST - 13]}-{fingerprint(differing)}",
            ", ".join(differing) or "the only job",
            list(overrides),
        )


@dataclass(frozen=True)
class Sweep:
    """The content of the list of jobs, `sweep.json`."""

    varies: list[str]
    """The names of the settings in which jobs differ."""
    given: str
    """A fingerprint of the settings that are equal in all jobs, and of the files that decide settings."""
    starts: int
    """Number of times that the sweep was started. Jobs of the same start were timed side by side."""
    command: str
    """The command line that started the sweep."""
    jobs: list[Job]

    @classmethod
    def read(cls, folder: Path) -> Sweep | None:
        """Return the sweep in a folder, or None if there is no list of jobs. Raises ValueError for a damaged list."""
        try:
            content = json.loads(read_bytes(folder / FILE))
            sweep = cls(**content | {"jobs": [Job(**job) for job in content["jobs"]]})
            names = [job.name for job in sweep.jobs]
            texts = [*sweep.varies, sweep.given, sweep.command, *names, *(job.label for job in sweep.jobs)]
            "".join([*texts, *(text for job in sweep.jobs for text in job.overrides)]).encode()  # TypeError: not a text
            if not isinstance(sweep.starts, int) or any("\0" in name or len(name.encode()) > 255 for name in names):
                raise TypeError
            return sweep
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"{folder / FILE}: damaged, it must list the jobs of a sweep") from None

    @classmethod
    def begin(
        cls, folder: Path, place: str, settings: Sequence[Sequence[str]], sources: object
    ) -> tuple[Sweep, Sweep | None]:
        """Return a sweep of jobs with these settings, and the sweep that the folder had before, if any.

        `sources` is everything beside the typed settings that decides a job. Jobs with the same settings are one job.
        Raises ValueError if the folder holds a different sweep or other files. The message names `place`, the setting
        for the folder.
        """
        before = cls.read(folder)
        if before is None and folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
            raise ValueError(f"{place}: its folder is not empty and holds no sweep, name another")
        different = sorted({_key(one) for of_job in settings for one in {*of_job} ^ {*settings[0]}})
        varies = different if before is None else before.varies
        if not {*different} <= {*varies} <= {*different, *map(_key, settings[0])}:
            raise ValueError(
                f"{place}: holds another sweep, over {', '.join(varies) or 'nothing'}; this one is over"
                f" {', '.join(different) or 'nothing'}, name another"
            )
        same = [one for one in settings[0] if _key(one) not in varies]
        fixed = sorted(one for one in same if _key(one).split(".")[0] not in (*SWEEP_SETTINGS, "cache"))
        starts = 1 if before is None else before.starts + 1
        jobs = {job.name: job for job in (Job.of(of_job, varies) for of_job in settings)}
        command = shlex.join(["python", *sys.argv])
        return cls(varies, fingerprint([fixed, sources]), starts, command, list(jobs.values())), before

    def write(self, folder: Path) -> None:
        """Write the list into the folder of the sweep."""
        write_json(make_folder("hydra.sweep.dir", folder) / FILE, asdict(self))

    def job(self, name: str) -> Job:
        """Return the job of this name."""
        return next(job for job in self.jobs if job.name == name)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def watch(folder: Path, pause: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yield the progress in words, each time that it changes, until no process runs the sweep.

    Raises ValueError for a folder without a sweep.
    """
    before = None
    while True:
        going, line = is_held(folder / LOCK), progress(folder)
        if line != before:
            yield line
        if not going:
            return
        before = line
        pause(PAUSE)


def progress(folder: Path, idle: int = 0) -> str:
    """Return in words how many jobs are done, running, failed and waiting, and the estimated time left.

    Only the folder is read, so a sweep can be watched from another process or machine. `idle` is the number of further
    jobs that could start now.
    """
    sweep = Sweep.read(folder)
    if sweep is None:
        raise ValueError(f"folder={folder}: holds no sweep, --watch follows one that was started with -m")
    statuses = [read_status(folder / job.name) for job in sweep.jobs]
    # A job that failed at an earlier start is done again at this one.
    current = [each for each in statuses if each.get("start") == sweep.starts or each.get("status") == "done"]
    states = Counter(str(each.get("status")) for each in current)
    done, running, failed = states["done"], states["running"], states["failed"] + states["died"]
    to_go = len(statuses) - done - running - failed
    line = f"{len(statuses)} jobs: {done} done, {running} running, {failed} failed, {to_go} to go"
    done_in = [each.get("seconds") for each in statuses if each.get("status") == "done"]
    seconds = [float(each) for each in done_in if isinstance(each, int | float) and 0 < each < 1e12]
    if seconds and running + idle and running + to_go:
        # A running job is half done, on average.
        left = sum(seconds) / len(seconds) * (running / 2 + to_go) / (running + idle)
        line += f", about {duration(left)} left"
    return line
