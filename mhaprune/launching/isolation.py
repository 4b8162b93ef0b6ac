"""Work in a process of its own: whatever becomes of it, the next job starts, and it is known how this one ended."""

from __future__ import annotations

import ctypes
import importlib
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

from mhaprune.interrupts import before_stopping, interruptible_once

GRACE = 20.0
"""Seconds for work that should stop to save its state."""
PAUSE = 0.5
"""Seconds between two looks whether the work is still wanted."""


def isolated(
    work: Callable[[], None], time_limit: float | None = None, wanted: Callable[[], bool] = lambda: True
) -> str | None:
    """Do the work in a copy of this process. Returns how the copy was killed, or None if it came to its end.

    A copy starts at once with all that is imported here. What it imports itself is imported here too, afterwards, so
    that the next copy need not. It ends with this process, and soon after nobody wants it any more. A signal that asks
    this process to stop lets the copy save first. `time_limit` is the work's own to keep; if it does not, the copy is
    killed a while later.
    """
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_child, args=(work, theirs))
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, which a copy lacks. This process only waits; the threads of torch start later.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    try:
        with before_stopping(lambda: _stop(process)):
            if not _ended(process, ours, None if time_limit is None else time_limit + GRACE, wanted):
                _stop(process)
    finally:
        overdue = process.is_alive()
        if overdue:
            process.kill()
            process.join()
        ours.close()
    if process.exitcode is None or process.exitcode >= 0:
        return None
    name = signal.Signals(-process.exitcode).name
    if overdue:
        return f"time_limit={time_limit:g}: did not stop by itself and was killed"
    return f"killed by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")


def _ended(process: ForkProcess, imported: Connection, seconds: float | None, wanted: Callable[[], bool]) -> bool:
    """Wait until the process ends or the time is over. Returns False, earlier, when the work is not wanted any more.

    Before it ends, the process says what it has imported.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    while not imported.poll(min(PAUSE, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return True
        if not wanted():
            return False
    with suppress(EOFError):
        for name in imported.recv():
            with suppress(Exception):
                importlib.import_module(name)
    process.join(GRACE)
    return True


def _stop(process: ForkProcess) -> None:
    """Ask it to stop, and wait until it has saved."""
    process.terminate()
    process.join(GRACE)


def _child(work: Callable[[], None], imported: Connection) -> None:
    end_with_parent()
    before = set(sys.modules)
    with interruptible_once():
        try:
            work()
        except BaseException:  # the work has said what it was
            sys.exit(1)
        finally:
            imported.send([name for name in sys.modules if name not in before])


def end_with_parent(parent: int | None = None) -> None:
    """Let this process be killed when its parent ends, also if that is killed itself. Linux only. It ends at once if
    `parent` is given and is not the parent any more."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os._exit(0)
