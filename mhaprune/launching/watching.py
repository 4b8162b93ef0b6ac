"""How far a sweep is: in a line, from its folder alone, so that it can be followed from anywhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from mhaprune.progress import duration
from mhaprune.storage.locks import is_held
from mhaprune.storage.store import read_status
from mhaprune.storage.sweeps import LOCK, Sweep

PAUSE = 2.0
"""Seconds between two looks."""


def watch(folder: Path, pause: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """A line each time that something has changed, until nobody does jobs of the sweep any more.

    Raises ValueError for a folder that holds no sweep.
    """
    before = None
    while True:
        going = is_held(folder / LOCK)
        line = progress(folder)
        if line != before:
            yield line
        if not going:
            return
        before = line
        pause(PAUSE)


def progress(folder: Path, idle: int = 0) -> str:
    """How many jobs are done, run, have failed and are to go, and about how long that takes.

    `idle` is how many jobs can start now, beside those that run.
    """
    sweep = Sweep.read(folder)
    if sweep is None:
        raise ValueError(f"folder={folder}: holds no sweep, --watch follows one that was started with -m")
    statuses = [read_status(folder / job.name) for job in sweep.jobs]
    # What failed at an earlier start is to be done at this one.
    states = Counter(
        str(status.get("status")) if status.get("start") == sweep.starts or status.get("status") == "done" else "to go"
        for status in statuses
    )
    done, running, failed = states["done"], states["running"], states["failed"] + states["died"]
    to_go = len(statuses) - done - running - failed
    line = f"{len(statuses)} jobs: {done} done, {running} running, {failed} failed, {to_go} to go"
    done_in = [status.get("seconds") for status in statuses if status.get("status") == "done"]
    seconds = [float(each) for each in done_in if isinstance(each, int | float) and 0 < each < 1e12]
    if seconds and running + idle and running + to_go:
        # Half of what runs is done, on average.
        left = sum(seconds) / len(seconds) * (running / 2 + to_go) / (running + idle)
        line += f", about {duration(left)} left"
    return line
