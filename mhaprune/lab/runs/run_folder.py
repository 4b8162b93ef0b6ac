"""Run folders: the files of a run, with a status that says whether it is complete."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.lab.reporting.figure_settings import FigureSettings
from mhaprune.storage.locks import is_held, locked, read_bytes, whose
from mhaprune.storage.seals import checksum
from mhaprune.storage.store import as_csv, inside, make_folder, write_bytes, write_json


class RunFolder:
    """The folder of one run. `status.json` says running, done or failed, and lists the files of the run.

    A run locks its folder until it ends. So two runs never share a folder, and a killed run is recognised: its status
    says running, but no process has the lock.
    """

    def __init__(self, path: Path | str, figure: FigureSettings | None = None) -> None:
        self.figure = figure or FigureSettings()
        self.path = make_folder("hydra.run.dir", Path(path))
        self.files: dict[str, str] = {}
        """The checksum of every file that the run wrote, by its name."""
        self.status: dict[str, Any] = {}
        self._locked = False

    @contextmanager
    def locked(self, wait: bool = False) -> Iterator[None]:
        """Lock the folder while the body runs, if this object has not locked it already.

        If another run uses the folder: with `wait`, wait until it ends; otherwise raise ValueError and change nothing.
        """
        if self._locked:
            yield
            return
        with locked(self.path / LOCK, None if wait else _refusal(self.path)):
            self._locked = True
            try:
                yield
            finally:
                self._locked = False

    @contextmanager
    def recorded(self) -> Iterator[RunFolder]:
        """Lock the folder, and keep `status.json` up to date while the body runs. The files of an earlier run are
        removed first. Raises ValueError if another run uses the folder."""
        with self.locked():
            self._clear()
            start = time.monotonic()
            self.status = {"status": "running", "reason": None, "started": _now(), "finished": None, "seconds": None}
            self._write_status()
            try:
                yield self
            except BaseException as error:
                self.status |= {"status": "failed", "reason": reason(error)}
                raise
            else:
                self.status |= {"status": "done"}
            finally:
                self.status |= {"finished": _now(), "seconds": round(time.monotonic() - start, 3)}
                try:
                    self._write_status()
                except OSError:  # a full disk: the status is worth more than the incomplete tables
                    self._clear()
                    self.files.clear()
                    self._write_status()

    def note(self, **facts: Any) -> None:
        """Add facts to `status.json`."""
        self.status |= facts
        self._write_status()

    def write(self, name: str, data: bytes) -> None:
        """Write one file, by its name below the folder. A later run in the same folder removes it."""
        path = inside(self.path, name)
        if path is None:
            raise ValueError(f"hydra.run.dir={self.path}: {name} leads out of this folder, by a link")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.files[name] = checksum(data)
        write_bytes(path, data)

    def write_table(self, name: str, frame: pd.DataFrame) -> None:
        self.write(f"{name}.csv", as_csv(frame))

    def write_figures(self, plots: Iterable[Any]) -> None:
        """Write every figure under its `name` in `figures/`, in each form and in the size of the settings."""
        for plot in plots:
            plot.shape(self.figure.width, self.figure.dpi)
            for form in self.figure.format:
                self.write(f"figures/{plot.name}.{form}", getattr(plot, form))

    def _write_status(self) -> None:
        write_json(self.path / "status.json", self.status | {"files": self.files})

    def _clear(self) -> None:
        files = read_status(self.path).get("files", ())
        for name in files if isinstance(files, list | dict) else ():
            path = inside(self.path, str(name))
            if path is not None and path.is_file():
                path.unlink()


LOCK = ".lock"
"""The file in a run folder that the run locks."""


def refuse_busy(folder: Path) -> None:
    """Raise ValueError if another run uses the folder."""
    if (owner := whose(folder / LOCK)) is not None:
        raise ValueError(_refusal(folder).replace("{holder}", owner))


def _refusal(folder: Path) -> str:
    return f"hydra.run.dir={folder}: in use by {{holder}}, name another folder"


def reason(error: BaseException) -> str:
    """Return the message of an error in one line, for a status."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return " ".join(f"{type(error).__name__}: {error}".split())


def read_status(folder: Path) -> dict[str, Any]:
    """Return the `status.json` of a folder; empty if it does not exist or cannot be read.

    A run is `died` if its status says running but its process has ended.
    """
    try:
        status = json.loads(read_bytes(folder / "status.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(status, dict):
        return {}
    if status.get("status") == "running" and not is_held(folder / LOCK):
        status |= {"status": "died", "reason": "its process is gone, killed or without power"}
    return status


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
