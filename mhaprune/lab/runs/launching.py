"""A sweep from start to end: start the unfinished jobs, handle failures and signals, and combine the results."""

import functools
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from mhaprune.interrupts import before_stopping
from mhaprune.lab.runs import run_folder
from mhaprune.lab.runs.collecting import collect, link_latest
from mhaprune.lab.runs.jobs import LOCK, STOP, Job, Sweep
from mhaprune.lab.runs.processes import GRACE, PAUSE
from mhaprune.lab.runs.run_folder import read_status
from mhaprune.lab.runs.run_reader import read_run
from mhaprune.lab.runs.sweep_settings import SweepSettings
from mhaprune.settings.plugins import allowed
from mhaprune.settings.refusals import visible
from mhaprune.storage.cache import code_of
from mhaprune.storage.locks import holder, is_held, locked
from mhaprune.storage.seals import Damaged

log = logging.getLogger(__name__)

DONE, CHANGED, OPEN = "done", "changed", "open"


class JobsFailed(ValueError):
    """Raised if some jobs of a sweep are not done; the message lists them with the reasons."""


class Launcher(Protocol):
    """An object that composes the settings of jobs and starts jobs."""

    def identity(self, job: Job) -> str:
        """Return the fingerprint that the run of this job would have with the present settings and code."""

    def check(self, job: Job) -> object:
        """Raise ValueError for a job that would be refused."""

    def start(self, jobs: Sequence[Job], starts: int) -> object:
        """Do these jobs, one by one or in parallel. `starts` counts the starts of the sweep, this one included. A
        failed job does not raise."""


def do_sweep(
    root: Path, settings: Sequence[Sequence[str]], sources: object, how: SweepSettings, launcher: Launcher
) -> None:
    """Do the unfinished jobs with these settings, and combine all jobs into `root`.

    `sources` is everything else that decides the settings. Raises ValueError, before any job starts, for a sweep that
    is not allowed, and JobsFailed at the end.
    """
    place = f"hydra.sweep.dir={root}" if how.sweep is None else f"sweep={how.sweep}"
    root.mkdir(parents=True, exist_ok=True)
    with _locked_sweep(root, place):
        sweep, before = Sweep.begin(root, place, settings, sources)
        # Settings are composed again only if anything that decides them has changed.
        identity = None if before is not None and before.given == sweep.given else launcher.identity
        states = {job.label: state_of(root, job, identity) for job in sweep.jobs}
        changed, done = ([label for label in states if states[label] == state] for state in (CHANGED, DONE))
        if changed and how.on_change == "refuse":
            raise ValueError(
                f"{place}: {len(changed)} of its jobs were done with other settings or other code ({_listed(changed)});"
                " on_change=redo does them again, another name keeps them"
            )
        todo = [job for job in sweep.jobs if states[job.label] != DONE]
        for job in todo:
            launcher.check(job)
        if done:
            print(visible(f"{len(done)} of {len(states)} jobs are done and skipped: {_listed(done)}"))
        sweep.write(root)
        start = functools.partial(launcher.start, starts=sweep.starts)
        (root / STOP).unlink(missing_ok=True)
        try:
            with before_stopping(lambda: _stop([root / job.name / run_folder.LOCK for job in sweep.jobs])):
                _do(todo, root, how.retries, start)
        finally:
            link_latest(root)
            for line in collect([root], root, how.figure):
                print(line)
            print(f"Report: {visible(str(root / 'report.html'))}")
    statuses = {job.label: read_status(root / job.name) for job in sweep.jobs}
    failed = [
        f"{label} ({': '.join(filter(None, [status.get('status', 'not started'), status.get('reason')]))})"
        for label, status in statuses.items()
        if status.get("status") != "done"
    ]
    if failed:
        raise JobsFailed(f"{len(failed)} of {len(statuses)} jobs not done: {'; '.join(failed)}")


@contextmanager
def _locked_sweep(root: Path, place: str) -> Iterator[None]:
    """Lock the sweep, so that other processes cannot run it. A refused sweep leaves no files."""
    new = not (root / LOCK).exists()
    try:
        with locked(root / LOCK, f"{place}: in use by {{holder}}, which does this sweep"):
            yield
    finally:
        if new and Sweep.read(root) is None:
            (root / LOCK).unlink()
            if not any(root.iterdir()):
                root.rmdir()


def state_of(root: Path, job: Job, identity: Callable[[Job], str] | None) -> str:
    """Return DONE for a finished, undamaged job whose results would not change if it were done again; CHANGED for one
    whose results could change; OPEN for all other jobs.

    `identity` returns the fingerprint that the run of a job would have now. This takes long, so `identity` is None if
    nothing that decides the fingerprint has changed.
    """
    run = read_run(root / job.name)
    if run.why_not is not None:
        return OPEN
    try:
        run.check()
    except Damaged:
        return OPEN
    code, same = run.status.get("code", {}), False
    with suppress(ImportError):
        packages = {module.split(".")[0] for module in code.get("modules", ())}
        same = packages <= set(allowed()) and code_of(code.get("modules", ())) == code
    return DONE if same and (identity is None or identity(job) == run.status["identity"].get("run")) else CHANGED


def _listed(labels: Sequence[str]) -> str:
    return "; ".join(labels[:8]) + (f" and {len(labels) - 8} more" if len(labels) > 8 else "")


def _do(todo: Sequence[Job], root: Path, retries: int, start: Callable[[Sequence[Job]], object]) -> None:
    """Start jobs until each is done or has failed more than `retries` times. Jobs that a launcher lost are started
    again."""
    tries: Counter[str] = Counter()
    remaining = list(todo)
    while remaining:
        before = {job.name: _status_version(root / job.name) for job in remaining}
        try:
            start(remaining)
        except Exception as error:  # of the launcher; errors of the jobs are in their folders
            log.error("jobs were lost: %s", run_folder.reason(error))
        while any(is_held(root / job.name / run_folder.LOCK) for job in remaining):  # a lost job may still run
            time.sleep(PAUSE)
        tried = [job for job in remaining if _status_version(root / job.name) != before[job.name]]
        tries.update(job.name for job in tried)
        if not tried or (root / STOP).exists():
            return
        again = []
        for job in (job for job in tried if tries[job.name] <= retries):
            status = read_status(root / job.name)
            if status.get("status") != "done" and not str(status.get("reason")).startswith("ConfigError"):
                log.warning("%s: is tried again", job.label)
                again.append(job)
        remaining = [job for job in remaining if job not in tried or job in again]


def _status_version(folder: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever the status of a job is written."""
    try:
        file = (folder / "status.json").stat()
    except OSError:
        return None
    return file.st_ino, file.st_mtime_ns


def _stop(locks: Sequence[Path]) -> None:
    """Ask running jobs to stop, also in other processes of a launcher, and wait until they have saved."""
    running = {lock: process for lock in locks if (process := holder(lock)) not in (None, os.getpid())}
    for process in running.values():
        assert process is not None
        os.kill(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while any(holder(lock) is not None for lock in running) and time.monotonic() < deadline:
        time.sleep(0.05)
