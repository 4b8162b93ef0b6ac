"""A sweep from start to end: which jobs are left, starting them, failures, signals, and what all of them found."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mhaprune.collecting.collect import collect
from mhaprune.interrupts import before_stopping
from mhaprune.launching.isolation import GRACE, PAUSE
from mhaprune.launching.resuming import CHANGED, DONE, standing
from mhaprune.storage.locks import Busy, holder, is_held, locked
from mhaprune.storage.store import LOCK as RUN_LOCK
from mhaprune.storage.store import read_status
from mhaprune.storage.sweeps import LOCK, STOP, Job, Orders, Sweep, begin, write

log = logging.getLogger(__name__)


class JobsFailed(ValueError):
    """Some jobs of a sweep are not done; the message says which and why."""


class Start(Protocol):
    """Does jobs, for the n-th start of the sweep."""

    def __call__(self, jobs: Sequence[Job], starts: int) -> object: ...


@dataclass(frozen=True)
class Launcher:
    """What a sweep needs to know from whoever composes settings and starts jobs."""

    identity: Callable[[Job], str]
    """The fingerprint of the run that a job would be now."""
    check: Callable[[Job], object]
    """Raises where the settings of a job are none that there are."""
    start: Start
    """One after the other or several at once; a job does not raise."""


More = Callable[[Sequence[Job]], Sequence[Sequence[str]]]
"""The settings of further jobs, by what the jobs so far have found; none at the end."""


def do_sweep(
    root: Path,
    place: str,
    settings: Sequence[Sequence[str]],
    sources: object,
    orders: Orders,
    launcher: Launcher,
    varying: Sequence[str] = (),
    more: More = lambda jobs: (),
) -> None:
    """Do the jobs with these settings that are not done yet, and `more`, then combine all of them into `root`.

    `place` is the setting that names the folder, `sources` is what decides settings beside what was typed, `varying`
    are settings that further jobs may change. Raises
    JobsFailed at the end, and ValueError before anything is started for a sweep that cannot be.
    """
    root.mkdir(parents=True, exist_ok=True)
    with _held(root, place):
        sweep, before = begin(root, place, settings, sources, varying)
        found = _standing(sweep, before, root, launcher)
        _refuse_changed(found, place, orders)
        todo = [job for job, how in found if how != DONE]
        for job in todo:
            launcher.check(job)
        _say_skipped([job.label for job, how in found if how == DONE], len(found))
        write(root, sweep)
        (root / STOP).unlink(missing_ok=True)
        start = functools.partial(launcher.start, starts=sweep.starts)
        try:
            with before_stopping(lambda: _stop([root / job.name for job in sweep.jobs])):
                while todo or settings:
                    _do(todo, root, orders, start)
                    settings = () if (root / STOP).exists() else more(sweep.jobs)
                    known, sweep = {job.name for job in sweep.jobs}, sweep.and_jobs(settings)
                    todo = [job for job in sweep.jobs if job.name not in known]
                    for job in todo:
                        launcher.check(job)
                    write(root, sweep)
        finally:
            for line in collect([root], root):
                print(line)
            print(f"all of it is in {root}, start with report.html")
    statuses = {job.label: read_status(root / job.name) for job in sweep.jobs}
    failed = {label: status for label, status in statuses.items() if status.get("status") != "done"}
    if failed:
        why = (
            f"{label} ({': '.join(filter(None, [status.get('status', 'not started'), status.get('reason')]))})"
            for label, status in failed.items()
        )
        raise JobsFailed(f"{len(failed)} of {len(statuses)} jobs not done: {'; '.join(why)}")


@contextmanager
def _held(root: Path, place: str) -> Iterator[None]:
    """No other process does the same sweep meanwhile. What is refused leaves nothing behind."""
    new = not (root / LOCK).exists()
    try:
        with locked(root / LOCK, wait=False):
            yield
    except Busy as error:
        raise ValueError(f"{place}: {error}, which does this sweep") from None
    finally:
        if new and Sweep.read(root) is None:
            (root / LOCK).unlink()
            if not any(root.iterdir()):
                root.rmdir()


def _standing(sweep: Sweep, before: Sweep | None, root: Path, launcher: Launcher) -> list[tuple[Job, str]]:
    """What was found of each job. Its settings are composed again only if anything that decides them has changed."""
    same = before is not None and before.given == sweep.given

    def now(job: Job) -> Callable[[], str] | None:
        return None if same else lambda: launcher.identity(job)

    return [(job, standing(root / job.name, now(job))) for job in sweep.jobs]


def _refuse_changed(found: Sequence[tuple[Job, str]], place: str, orders: Orders) -> None:
    changed = [job.label for job, how in found if how == CHANGED]
    if changed and orders.on_change == "refuse":
        raise ValueError(
            f"{place}: {len(changed)} of its jobs were done with other settings or other code ({_listed(changed)});"
            " on_change=redo does them again, another name keeps them"
        )


def _say_skipped(done: Sequence[str], jobs: int) -> None:
    if done:
        print(f"{len(done)} of {jobs} jobs are done and skipped: {_listed(done)}")


def _listed(labels: Sequence[str]) -> str:
    return "; ".join(labels[:8]) + (f" and {len(labels) - 8} more" if len(labels) > 8 else "")


def _do(todo: Sequence[Job], root: Path, orders: Orders, start: Callable[[Sequence[Job]], object]) -> None:
    """Start jobs until each is done or has failed often enough; a launcher may lose some that it never started."""
    tries: Counter[str] = Counter()
    left = list(todo)
    while left:
        before = {job.name: _mark(root / job.name) for job in left}
        try:
            start(left)
        except Exception as error:  # of whatever does the jobs; what they say themselves stands in their folders
            log.error("jobs were lost: %s", " ".join(f"{type(error).__name__}: {error}".split()))
        while any(is_held(root / job.name / RUN_LOCK) for job in left):  # it may have lost one, and wait for none
            time.sleep(PAUSE)
        tried = [job for job in left if _mark(root / job.name) != before[job.name]]
        tries.update(job.name for job in tried)
        if not tried or (root / STOP).exists():
            return
        again = [job for job in tried if tries[job.name] <= orders.retries and _may_end_better(root / job.name)]
        for job in again:
            log.warning("%s: is tried again", job.label)
        left = [job for job in left if job not in tried or job in again]


def _may_end_better(folder: Path) -> bool:
    status = read_status(folder)
    return status.get("status") != "done" and not str(status.get("reason")).startswith("ConfigError")


def _mark(folder: Path) -> tuple[int, int] | None:
    """Another each time that the status of a job was written."""
    try:
        found = (folder / "status.json").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _stop(folders: Iterable[Path]) -> None:
    """Ask the jobs that run to stop, wherever a launcher has put them, and wait until they have saved."""
    locks = [folder / RUN_LOCK for folder in folders]
    running = {lock: process for lock in locks if (process := holder(lock)) not in (None, os.getpid())}
    for process in running.values():
        assert process is not None
        os.kill(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while any(holder(lock) is not None for lock in running) and time.monotonic() < deadline:
        time.sleep(0.05)
