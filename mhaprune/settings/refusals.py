"""Error messages for users: one line with the key, its value and what is allowed."""

import errno
import io
import os
import pickle
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unicodedata import category

from mhaprune.settings.plugins import PACKAGE

BROUGHT = ("task", "model", "gate", "training")
"""Settings of a run that are stored in a saved model, so the user cannot set them beside `model_file`."""

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""The numbers of errors of a disk that takes no more; these errors often do not say where."""


def visible(text: str) -> str:
    r"""Return a text in one line that a terminal only shows: control characters and line breaks are written out.

    >>> visible("sort\nall is fine\x1b[31m")
    'sort\\nall is fine\\x1b[31m'
    """
    shown = (c if c.isprintable() or category(c) == "Zs" else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)


def show_all() -> None:
    """Make a terminal show a character that it does not have as its number, `\\u2026`, instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class RunFailed(BaseException):
    """Raised to carry the error of a run past Hydra, which would print every `Exception` in its own way."""


class JobFailed(Exception):
    """Raised to tell Hydra that a job of a sweep has failed, with the reason as a text: errors may not survive the way
    from another process."""


def one_line(error: BaseException) -> str:
    """Return the message of any error in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; the same command goes on from what was saved"
    if isinstance(error, OSError) and (error.filename or error.errno in FULL):
        where = f"{error.filename}: " if error.filename else ""
        return visible(f"{where}{error.strerror}") + "; hydra.run.dir and cache must name folders that can be written"
    text = visible(" ".join(str(error).split()))
    if isinstance(error, ValueError):
        return text
    return f"{type(error).__name__}: {text}{_place(error)} (HYDRA_FULL_ERROR=1 shows all)"


def quoted(words: Iterable[Any]) -> str:
    """Return words of a file that may be anybody's, for a message: the first three, short, and without signs that
    steer a terminal."""
    short = (str(word)[:60] for word in islice(words, 3))
    return ", ".join("".join(sign if sign.isprintable() else "?" for sign in word) for word in short)


@contextmanager
def foreign(where: str, code: str = "") -> Iterator[None]:
    """Turn any exception inside the context into a ValueError of one line that begins with `where`.

    `code` names the setting that allows transformers to run Python code from a folder; the message mentions it.
    """
    try:
        yield
    except Exception as error:
        text = "".join(sign for sign in " ".join(str(error).split())[:500] if sign.isprintable())
        if "trust_remote_code" in text:
            text = f"it names Python code to run, auto_map, which only {code} allows"
        elif "weights_only" in text or isinstance(error, pickle.UnpicklingError):  # torch advises to run its code
            text = "its weights hold something else than plain content"
        elif not isinstance(error, ValueError):
            text = f"{type(error).__name__}: {text}"
        raise ValueError(f"{where}, {text}") from None


@contextmanager
def naming_full_disk(path: Path | str) -> Iterator[None]:
    """Add the path to the error of a disk that takes no more: libraries that write files often do not say where."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None) or next((n for n in FULL if f"os error {n}" in str(error)), None)
        if number not in FULL or getattr(error, "filename", None):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _place(error: BaseException) -> str:
    """Return the last line of mhaprune or of the user's code (not of a library) that an error passed: `, in
    my_heads/loud.py line 17`."""
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if PACKAGE in path.parents or not any(library in path.parents for library in libraries):
            return f", in {'/'.join(path.parts[-2:])} line {frame.lineno}"
    return ""
