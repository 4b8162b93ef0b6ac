"""Runs as the command line does them: alone in this process, or as one job of a sweep in a process of its own."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mhaprune.interrupts import limited
from mhaprune.launching.isolation import isolated
from mhaprune.launching.showing import shown
from mhaprune.launching.watching import progress
from mhaprune.running import Results, Run
from mhaprune.settings.plugins import results_folder
from mhaprune.settings.refusals import RunFailed
from mhaprune.storage.locks import holder, locked, whose
from mhaprune.storage.store import LOCK as RUN_LOCK
from mhaprune.storage.store import RunFolder, make_folder, read_status, set_failed, write_bytes
from mhaprune.storage.sweeps import LOCK, STOP, Orders, Sweep

log = logging.getLogger(__name__)

Build = Callable[[], Run]
"""Makes a run from its settings; raises ValueError for settings that cannot be."""
Ordered = Callable[[], Orders]
"""Reads from the same settings how the run is to be done; raises ValueError too."""


def do_alone(build: Build, output: Path, overrides: Sequence[str], ordered: Ordered) -> None:
    """One run. Raises RunFailed; a run that is refused leaves no folder."""
    refused = True
    try:
        orders = ordered()
        if orders.sweep is not None:
            raise ValueError(f"sweep={orders.sweep}: names a sweep, which needs -m")
        if orders.search is not None:
            raise ValueError("search=optuna: chooses the jobs of a sweep, which needs -m")
        run = build()
        run.prepare()
        refused = False
        with shown():
            results = _recorded(lambda: run, output, overrides, orders)
    except BaseException as error:
        _log_traceback()
        if refused and not read_status(output):
            _forget(output)
        raise RunFailed(error) from error
    _say(results, output)


def do_in_sweep(build: Build, output: Path, overrides: Sequence[str], ordered: Ordered, start: int) -> None:
    """One job. It never raises for what goes wrong in it: its status says that, and so does the log, at once.

    Where its sweep is gone it does nothing and ends its process, which may have waited since an earlier `start`.
    """
    root, orders = output.parent, ordered()
    sweep, owner = Sweep.read(root), whose(root / LOCK)
    assert sweep is not None
    if sweep.starts != start or owner is None:
        os._exit(0)  # a worker of a launcher might wait for more
    if (root / STOP).exists():
        return
    label = sweep.job(output.name).label
    beside_others = holder(root / LOCK) != os.getpid()

    def work() -> None:
        _prefix(label)
        try:
            if _done_meanwhile(output, start):
                return
            with shown(label, lines=beside_others):
                results = _recorded(build, output, overrides, orders, wait=True, start=start)
        except BaseException:
            _log_traceback()
            raise
        _say(results, output)

    killed = isolated(work, orders.time_limit, lambda: whose(root / LOCK) == owner)
    if killed is not None:
        set_failed(output, killed)
    status = read_status(output)
    if status.get("status") != "done":
        log.error("%s: %s, %s", label, status.get("status"), " ".join(str(status.get("reason")).split()))
        if orders.on_failure == "stop":
            write_bytes(root / STOP, b"")
    log.info("%s", progress(root, idle=1))


def _done_meanwhile(output: Path, start: int) -> bool:
    """Wait until no other process does this job, which a queue may hold twice. Returns whether it is done then."""
    with locked(make_folder("hydra.run.dir", output) / RUN_LOCK):
        status = read_status(output)
        return status.get("status") == "done" and status.get("start") == start


def _recorded(
    build: Build, output: Path, overrides: Sequence[str], orders: Orders, wait: bool = False, **facts: int
) -> Results:
    with RunFolder(output).recorded(wait) as folder, limited(orders.time_limit):
        folder.note(kind="run", overrides=list(overrides), **facts)
        return build()(folder)


def _say(results: Results, output: Path) -> None:
    for line in results.sentences:
        log.info("%s", line)
    log.info("all of it is in %s, start with report.html", output)


def _prefix(label: str) -> None:
    """Say on the terminal which job a line is from."""
    for handler in logging.getLogger().handlers:
        if not isinstance(handler, logging.FileHandler):
            handler.setFormatter(logging.Formatter(f"{label.replace('%', '%%')}: %(message)s"))


def _log_traceback() -> None:
    """Hydra's launchers lose a job's traceback, so its own log must have it; the terminal gets a line."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "failed", (), sys.exc_info()))


def _forget(output: Path) -> None:
    """Remove the folder that Hydra made for a run that was refused. Inside the folder of all results, empty folders
    above it go too; anywhere else these may be the user's, and stay."""
    for handler in logging.getLogger().handlers:
        handler.close()
    for name in (".hydra", "run.log"):
        path = output / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    ours = results_folder().resolve()
    for folder in (output, *(above for above in output.parents if ours in above.parents)):
        if folder in (ours, Path.cwd()) or not folder.is_dir() or any(folder.iterdir()):
            return
        folder.rmdir()
