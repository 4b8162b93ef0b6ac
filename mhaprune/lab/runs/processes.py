"""Runs of the command line: one alone in this process, or a job of a sweep in a process of its own.

However the process of a job ends, its end is recorded and the next job starts.
"""

import ctypes
import logging
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path

from mhaprune.interrupts import before_stopping, interruptible_once, limited
from mhaprune.lab.runs import run_folder
from mhaprune.lab.runs.jobs import LOCK, STOP, Sweep, progress
from mhaprune.lab.runs.run import Results, Run
from mhaprune.lab.runs.sweep_settings import SweepSettings
from mhaprune.progress import shown
from mhaprune.settings.plugins import results_folder
from mhaprune.settings.refusals import RunFailed
from mhaprune.storage.locks import holder, locked, whose
from mhaprune.storage.store import make_folder, write_bytes

log = logging.getLogger(__name__)

Build = Callable[[], Run]
"""A function that makes a run from its settings; raises ValueError for settings that are not allowed."""
ReadSettings = Callable[[], SweepSettings]
"""A function that reads the settings of a sweep from the settings of a run; raises ValueError for settings that are not
allowed."""
GRACE = 20.0
"""Seconds that a process has to save its state after it is asked to stop."""
PAUSE = 0.5
"""Seconds between two checks whether a job is still wanted and whether it still runs."""


def do_alone(build: Build, output: Path, overrides: Sequence[str], read_settings: ReadSettings) -> None:
    """Do one run. Raises RunFailed. A run that is refused for its settings leaves no folder."""
    refused = True
    try:
        settings = read_settings()
        if settings.sweep is not None:
            raise ValueError(f"sweep={settings.sweep}: names a sweep, which needs -m")
        run = build()
        run.source.prepare()
        refused = False
        try:
            with shown():
                results = _recorded(lambda: run, output, overrides, settings)
        finally:
            from mhaprune.lab.runs.collecting import link_latest

            link_latest(output)
    except BaseException as error:
        _log_traceback()
        if refused and not run_folder.read_status(output):
            _remove_refused(output)
        raise RunFailed(error) from error
    _say(results, output)


def do_in_sweep(build: Build, output: Path, overrides: Sequence[str], read_settings: ReadSettings, start: int) -> None:
    """Do one job.

    A failed job does not raise; its failure is written to the status and the log at once. If the sweep has ended or was
    started again since its start number `start`, this process ends without doing the job: the job may have waited in a
    queue.
    """
    root, settings = output.parent, read_settings()
    sweep, owner = Sweep.read(root), whose(root / LOCK)
    assert sweep is not None
    if sweep.starts != start or owner is None:
        os._exit(0)  # a worker of a launcher might wait for more
    if (root / STOP).exists():
        return
    label = sweep.job(output.name).label
    beside_others = holder(root / LOCK) != os.getpid()

    def work() -> None:
        for handler in logging.getLogger().handlers:  # say on the terminal which job a line is from
            if not isinstance(handler, logging.FileHandler):
                handler.setFormatter(logging.Formatter(f"{label.replace('%', '%%')}: %(message)s"))
        try:
            with locked(make_folder("hydra.run.dir", output) / run_folder.LOCK):  # a queue may hold a job twice
                status = run_folder.read_status(output)
            if status.get("status") == "done" and status.get("start") == start:
                return
            with shown(label, lines=beside_others):
                results = _recorded(build, output, overrides, settings, wait=True, start=start)
        except BaseException:
            _log_traceback()
            raise
        _say(results, output)

    killed = isolated(work, settings.time_limit, lambda: whose(root / LOCK) == owner)
    if killed is not None:
        run_folder.set_failed(output, killed)
    status = run_folder.read_status(output)
    if status.get("status") != "done":
        log.error("%s: %s, %s", label, status.get("status"), status.get("reason"))
        if settings.on_failure == "stop":
            write_bytes(root / STOP, b"")
    log.info("%s", progress(root, idle=1))


def _recorded(
    build: Build, output: Path, overrides: Sequence[str], settings: SweepSettings, wait: bool = False, **facts: int
) -> Results:
    with run_folder.RunFolder(output, settings.figure).recorded(wait) as folder, limited(settings.time_limit):
        folder.note(kind="run", overrides=list(overrides), **facts)
        return build()(folder)


def _say(results: Results, output: Path) -> None:
    for line in results.brief:
        log.info("%s", line)
    report, here = output / "report.html", Path.cwd()
    log.info("Report: %s", report.relative_to(here) if report.is_relative_to(here) else report)


def _log_traceback() -> None:
    """Write the traceback to the log file of the run, because Hydra's launchers lose it. The terminal shows one
    line."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "failed", (), sys.exc_info()))


def _remove_refused(output: Path) -> None:
    """Remove the folder that Hydra made for a refused run. Empty folders above it are removed too, but only inside the
    folder of all results: elsewhere they may be the user's."""
    for handler in logging.getLogger().handlers:
        handler.close()
    shutil.rmtree(output / ".hydra", ignore_errors=True)
    (output / "run.log").unlink(missing_ok=True)
    ours = results_folder().resolve()
    for folder in (output, *(above for above in output.parents if ours in above.parents)):
        if folder in (ours, Path.cwd()) or not folder.is_dir() or any(folder.iterdir()):
            return
        folder.rmdir()


def isolated(
    work: Callable[[], None], time_limit: float | None = None, wanted: Callable[[], bool] = lambda: True
) -> str | None:
    """Do the work in a fork of this process. Return a text that says how the fork was killed, or None if it ended by
    itself.

    The fork starts fast, because everything is imported already. It ends if this process ends, and soon after `wanted`
    returns False. If a signal asks this process to stop, the fork saves first. The work must end by itself within
    `time_limit` seconds; otherwise the fork is killed some seconds later.
    """
    process = multiprocessing.get_context("fork").Process(target=_child, args=(work,))
    with warnings.catch_warnings():
        # Python 3.12 warns that a fork has no threads. This process only waits; torch starts its threads later.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()

    def stop() -> None:
        process.terminate()
        process.join(GRACE)  # time to save

    try:
        with before_stopping(stop):
            if not _ended(process, None if time_limit is None else time_limit + GRACE, wanted):
                stop()
    finally:
        overdue = process.is_alive()
        if overdue:
            process.kill()
            process.join()
    if process.exitcode is None or process.exitcode >= 0:
        return None
    if overdue:
        why = "its sweep is gone" if time_limit is None else f"time_limit={time_limit:g}"
        return f"{why}: did not stop by itself and was killed"
    name = signal.Signals(-process.exitcode).name
    return f"killed by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")


def _ended(process: ForkProcess, seconds: float | None, wanted: Callable[[], bool]) -> bool:
    """Wait until the process ends or the time is over, and return True; return False as soon as `wanted` does."""
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    while process.is_alive() and time.monotonic() < deadline:
        if not wanted():
            return False
        process.join(min(PAUSE, max(0.0, deadline - time.monotonic())))
    return True


def _child(work: Callable[[], None]) -> None:
    end_with_parent()
    with interruptible_once():
        try:
            work()
        except BaseException:  # the work has logged the error
            sys.exit(1)


def end_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when its parent ends, even if the parent is killed. Linux only. If `parent` is
    given and is no longer the parent, this process ends at once."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os._exit(0)
