"""Locks that end with the process that holds them, however it ends, and that say whose they are."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds of waiting after which it is said who is waited for."""
PAUSE = 0.05
"""Seconds between two tries."""


class Busy(ValueError):
    """Another process holds the lock; the message says which."""


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock file `path` while the body runs. Where another holds it: wait, or raise Busy.

    The file stays when the lock is gone: to remove it would let two processes hold locks of one name.
    """
    with path.open("a+") as file:
        start, said = time.monotonic(), False
        while not _taken(file, fcntl.LOCK_EX):
            waited = time.monotonic() - start
            if not wait and waited > 4 * PAUSE:  # someone who only looks holds it for a moment
                raise Busy(f"in use by {_holder(path)}")
            if waited > PATIENCE and not said:
                log.warning("waits for %s, which holds %s", _holder(path), path)
                said = True
            time.sleep(PAUSE)
        _sign(file, path)
        yield


def _sign(file: IO[str], path: Path) -> None:
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}")
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk does not say where


def whose(path: Path) -> str | None:
    """A text that belongs to the process that holds this lock, and to no other; None if no process holds it."""
    said = _holder(path)
    return said if is_held(path) else None


def is_held(path: Path) -> bool:
    """Whether some process holds this lock."""
    try:
        with path.open() as file:
            return not _taken(file, fcntl.LOCK_SH)
    except OSError:
        return False


def refuse_held(path: Path) -> None:
    """Raise Busy where another process holds the lock."""
    if is_held(path):
        raise Busy(f"in use by {_holder(path)}")


def _taken(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(path: Path) -> int | None:
    """The process of this machine that holds a lock; None if none does."""
    found = re.match(rf"process (\d+) on {re.escape(socket.gethostname())} since", _holder(path))
    return int(found[1]) if found and is_held(path) else None


def _holder(path: Path) -> str:
    try:
        return path.read_text() or "another process"
    except OSError:
        return "another process"
