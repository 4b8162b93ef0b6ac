"""Locks of files. A lock names the process that holds it, and ends with this process, even if the process is killed."""

import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:
    raise ImportError("mhaprune: runs on Linux and macOS, whose locks it needs; on Windows use WSL") from None

log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds of waiting before a warning names the process that has the lock."""
PAUSE = 0.05
"""Seconds between two tries to lock a file."""


def regular(path: str, flags: int) -> int:
    """Open a regular file, for `open(path, opener=regular)`. Raises OSError for a pipe, which would block, and for
    writing through a link."""
    links = 0 if flags & os.O_ACCMODE == os.O_RDONLY else os.O_NOFOLLOW
    try:
        file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | links, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link, through which nothing is written", path) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is no regular file", path)
    return file


def read_bytes(path: Path, most: int = -1) -> bytes:
    """Return the bytes of a regular file. Raises OSError for anything else, and for more than `most` bytes if that is
    given."""
    with open(path, "rb", opener=regular) as file:
        data = file.read(most + 1 if most >= 0 else -1)
    if 0 <= most < len(data):
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return data


@contextmanager
def locked(path: Path, refusal: str | None = None) -> Iterator[None]:
    """Lock the file `path` while the body runs. If another process has locked the file: without a `refusal`, wait; with
    one, raise ValueError with the `refusal`, in which {holder} is replaced by that process.

    The file is not removed afterwards. Otherwise two processes could hold locks on two files of the same name.
    """
    with _lockable(path) as file:
        start, said = time.monotonic(), False
        while not _try_lock(file, fcntl.LOCK_EX):
            waited = time.monotonic() - start
            if refusal is not None and waited > 4 * PAUSE:  # is_held() locks it for a moment
                raise ValueError(refusal.replace("{holder}", _holder(path)))
            if waited > PATIENCE and not said:
                log.warning("waits for %s, which holds %s", _holder(path), path)
                said = True
            time.sleep(PAUSE)
        text = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}"
        try:
            file.truncate(0)
            file.write(text.encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk does not say where
        yield


def _lockable(path: Path) -> IO[bytes]:
    try:
        return open(path, "ab+", buffering=0, opener=regular)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EISDIR):
            raise
        raise ValueError(f"{path}: {error.strerror}, remove it or name another folder") from None


def whose(path: Path) -> str | None:
    """Return a text that identifies the process that has this lock; None if no process has it."""
    said = _holder(path)
    return said if is_held(path) else None


def is_held(path: Path) -> bool:
    """Return whether any process has this lock."""
    try:
        with open(path, opener=regular) as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except OSError:
        return False


def _try_lock(file: IO[Any], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    try:
        return read_bytes(path).decode() or "another process"
    except (OSError, ValueError):
        return "another process"
