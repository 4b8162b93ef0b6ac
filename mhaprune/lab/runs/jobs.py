"""Do a run and leave its folder: a single run, or a job of a sweep, which is skipped if it was done before."""

import functools
import gc
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mhaprune.interrupts import limited
from mhaprune.lab.runs.run import Results, Run
from mhaprune.lab.runs.run_folder import RunFolder, read_status, reason
from mhaprune.lab.runs.run_reader import read_run
from mhaprune.lab.runs.sweep_settings import SweepSettings, deciding
from mhaprune.lab.runs.trackers import hand_over
from mhaprune.progress import shown
from mhaprune.settings.plugins import results_folder
from mhaprune.settings.refusals import JobFailed, RunFailed
from mhaprune.storage.cache import code_of
from mhaprune.storage.seals import Damaged

log = logging.getLogger(__name__)

Build = Callable[[], Run]
"""A function that makes a run from its settings; raises ValueError for settings that are not allowed."""
ReadSettings = Callable[[], SweepSettings]
"""A function that reads the settings of a sweep from the settings of a run; raises ValueError for settings that are not
allowed."""


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
        gc.freeze()  # imported objects stay: the garbage collector need not look through them again
        try:
            with shown():
                results = _recorded(RunFolder(output, settings.figure), lambda: run, overrides, settings)
        finally:
            from mhaprune.lab.runs.collecting import link_latest

            link_latest(output)
    except BaseException as error:
        _log_traceback()
        if refused and not read_status(output):
            _remove_refused(output)
        raise RunFailed(error) from error
    _say(results, output, settings.on_results)


def do_in_sweep(
    build: Build, output: Path, overrides: Sequence[str], read_settings: ReadSettings, label: str, in_parallel: bool
) -> float | None:
    """Do one job of a sweep, unless its folder holds what the same settings and the same code have made. Return the
    first headline number of the run, None if its experiment has no such number.

    If another process does this job now, wait for it. Raises JobFailed, so that the sweep can go on with other jobs.
    With `in_parallel`, jobs share the terminal, so progress is shown as lines.
    """
    for handler in logging.getLogger().handlers:  # say on the terminal which job a line is from
        if not isinstance(handler, logging.FileHandler):
            handler.setFormatter(logging.Formatter(f"{label.replace('%', '%%')}: %(message)s"))
    try:
        settings, build = read_settings(), functools.cache(build)
        folder = RunFolder(output, settings.figure)
        with folder.locked(wait=True):
            if _is_done(output, build, overrides):
                log.info("is done and skipped")
            else:
                with shown(label, lines=in_parallel):
                    results = _recorded(folder, build, overrides, settings)
                _say(results, output, settings.on_results)
    except BaseException as error:
        _log_traceback()
        if not isinstance(error, Exception):  # an interrupt ends the sweep
            raise
        log.error("failed, %s", reason(error))
        raise JobFailed(f"{label}: {reason(error)}") from error
    headline = read_run(output).read().headline
    return headline[0].value if headline else None


def _is_done(output: Path, build: Build, overrides: Sequence[str]) -> bool:
    """Return whether the folder holds an undamaged run that was done with these settings and the present code. Raises
    ValueError if it holds another job, which would be lost."""
    found = read_run(output)
    if found.why_not is not None:
        return False
    try:
        found.check()
    except Damaged:
        return False
    if (others := deciding(found.status.get("overrides", overrides))) != deciding(overrides):
        raise ValueError(f"hydra.sweep.subdir={output.name}: holds the job {' '.join(others)}, name another folder")
    run, status = build(), found.status
    same = status.get("identity", {}).get("run") == run.identity["run"]
    return same and status.get("code") == code_of(run.packages)


def _recorded(folder: RunFolder, build: Build, overrides: Sequence[str], settings: SweepSettings) -> Results:
    with folder.recorded(), limited(settings.time_limit):
        folder.note(kind="run", overrides=list(overrides))
        return build()(folder)


def _say(results: Results, output: Path, on_results: str | None) -> None:
    hand_over(on_results, results)
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
