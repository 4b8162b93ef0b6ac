"""Files and tables, written so that a half-written file is never taken for a complete one."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd

from mhaprune.storage.locks import regular


def write_bytes(path: Path, data: bytes) -> None:
    """Write data as `write_file` does."""
    write_file(path, lambda file: file.write(data))


def write_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write to a temporary name beside `path`, then rename, so that a reader sees the old or the new file, complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=regular) as file:
            write(file)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        if not isinstance(cause := error.__context__ if isinstance(error, RuntimeError) else error, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error  # a full disk, and torch, do not say where
    finally:
        temporary.unlink(missing_ok=True)


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, as_json(value))


def make_folder(key: str, path: Path) -> Path:
    """Make the folder `path` if necessary. Raises ValueError that names the setting `key` if it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{key}={path}: cannot be written ({why}), name a folder that can") from None
    return path


def fingerprint(description: Any) -> str:
    """Return twelve hexadecimal digits that identify this description: another description has other digits."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]


def inside(folder: Path, name: str) -> Path | None:
    """Return the path of the file with this name below the folder. Return None if the name leads out of the folder, by
    `..` or by a link."""
    try:
        home = folder.resolve()
        path = (home / name).resolve()
        return folder / name if path.is_relative_to(home) and path != home else None
    except (OSError, ValueError, RuntimeError):  # a zero byte, a loop of links
        return None


def refuse_links(key: str, folder: Path, names: Iterable[str]) -> None:
    """Raise ValueError if one of these names, to be written below the folder, leads elsewhere (by a link or `..`) or is
    not a regular file."""
    home = folder.resolve()
    for name in names:
        path = home / name
        if not path.is_relative_to(home) or path.resolve() != path or (path.exists() and not path.is_file()):
            raise ValueError(f"{key}={folder}: {name} is a link or no regular file, through which nothing is written")


FORMULA = r"^(?=[=+\-@\t\r']|\s+[=+\-@])"
"""The beginning of a text that a spreadsheet could run as a formula, or that begins with the sign that prevents it."""


def as_csv(frame: pd.DataFrame) -> bytes:
    """Return a table as CSV. A text, also the name of a column, that a spreadsheet would run as a formula gets a `'` in
    front, which `read_table` takes away."""
    write = partial(frame.rename(columns=_marked).map(_marked).to_csv, index=False, float_format="%.9g")
    text: str = write()
    return (write(quoting=csv.QUOTE_ALL) if "\r" in text else text).encode()  # csv takes \r for a plain character


def _marked(value: Any) -> Any:
    return re.sub(FORMULA, "'", value) if isinstance(value, str) else value


def read_table(data: bytes) -> pd.DataFrame:
    """Return the table that `as_csv` wrote, with the texts as they were."""
    return pd.read_csv(io.BytesIO(data), low_memory=False).rename(columns=_unmarked).map(_unmarked)


def _unmarked(value: Any) -> Any:
    return value[1:] if isinstance(value, str) and value[:1] == "'" and re.match(FORMULA, value[1:]) else value
