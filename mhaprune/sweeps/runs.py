"""Run folders as they are found: each is read with care, as it may be damaged, unfinished or somebody else's."""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.experiments.base import Experiment
from mhaprune.settings.plugins import find_class
from mhaprune.storage.locks import read_bytes
from mhaprune.storage.seals import Damaged, checksum
from mhaprune.storage.store import in_one_line, inside, read_status
from mhaprune.sweeps.jobs import FILE, Sweep

RUN, COLLECTION = "run", "collection"
"""What a folder's `status.json` says under `kind`."""
MOST = 1000
"""Of settings of a run and of columns of a table: more would take minutes, and no run has them."""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e12


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_plain(value: Any) -> bool:
    few = isinstance(value, dict) and len(value) <= MOST
    return few and not any(isinstance(item, dict | list) for item in value.values())


def _is_small_map(value: Any) -> bool:
    """Check what `SmallMap` holds; None for a run without one."""
    if not isinstance(value, dict):
        return value is None
    whole = value.keys() == {"title", "rows"} and _are_texts([value["title"]]) and _are_texts(value["rows"])
    return whole and set("".join(value["rows"])) <= set("01 ")


TEXT = (lambda value: isinstance(value, str), "a text")
PLAIN = (_are_plain, f"a mapping of plain values, at most {MOST}")
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "status": TEXT,
    "kind": TEXT,
    "experiment": TEXT,
    "identity": PLAIN,
    "trained_with": PLAIN,
    "reason": (lambda value: value is None or isinstance(value, str), "a text or null"),
    "seconds": (lambda value: value is None or _is_number(value), "a number or null"),
    "start": (lambda value: type(value) is int and _is_number(value), "a whole number"),
    "findings": (_are_texts, "a list of texts"),
    "head_map": (_is_small_map, "a title and rows of 0, 1 and blanks"),
    "overrides": (lambda value: _are_texts(value) and len(value) <= MOST, f"a list of texts, at most {MOST}"),
    "files": (
        lambda value: _are_texts([*value.values()] if isinstance(value, dict) else value),
        "names with their checksums",
    ),
}
"""The fields of a status that are read, and what each must be."""


@dataclass(frozen=True)
class FoundRun:
    """A run folder and what its status says; a job that died before it could write one has none."""

    folder: Path
    status: dict[str, Any]
    damage: str | None = None
    """What is wrong with the status itself, which is then empty."""

    @property
    def place(self) -> str:
        """Its folder as a text; bytes that are no UTF-8 are replaced."""
        return os.fsencode(self.folder).decode(errors="replace")

    @cached_property
    def experiment(self) -> type[Experiment] | None:
        """The experiment that was run; None for one that this mhaprune does not know."""
        return find_class(Experiment, self.status["experiment"]) if "experiment" in self.status else None

    @property
    def why_not(self) -> str | None:
        """Why the run is not among those compared; None for one that is."""
        if self.damage is not None:
            return f"damaged: {self.damage}"
        if (state := self.status.get("status", "no status")) != "done":
            return ": ".join([state, *filter(None, [in_one_line(self.status.get("reason") or "")])])
        if "experiment" not in self.status:
            return "too old: its status names no experiment, run it again"
        if self.experiment is None:
            return f"of an experiment that is not installed, {self.status['experiment']}"
        return None

    @property
    def files(self) -> dict[str, str | None]:
        """The checksums of the files that the run wrote; None for those of older runs."""
        files = self.status.get("files", {})
        return files if isinstance(files, dict) else dict.fromkeys(files)

    @property
    def sealed(self) -> bool:
        """True if all files have checksums. Only then what the status says is known to be about these files."""
        return len(self.files) > 0 and None not in self.files.values()

    def check(self) -> None:
        """Raises Damaged if a file of the run is missing or not as the run wrote it."""
        for name in self.files:
            self._read(name)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Read the tables of the run by their names. Raises Damaged if one is missing, no table, or not as the run
        wrote it."""
        found = {}
        for name in (name for name in self.files if name.endswith(".csv")):
            if Path(name).name != name:
                raise Damaged(f"{name} is not a file of this folder")
            data = self._read(name)
            try:
                found[name.removesuffix(".csv")] = pd.read_csv(io.BytesIO(data), low_memory=False)
            except Exception as error:  # whatever pandas meets in a foreign file
                raise Damaged(f"{name} is no table ({in_one_line(str(error))})") from None
        return found

    def _read(self, name: str) -> bytes:
        path, expected = inside(self.folder, name), self.files[name]
        if path is None:
            raise Damaged(f"{name} is not a file of this folder")
        try:
            data = read_bytes(path)
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None
        if expected is not None and checksum(data) != expected:
            raise Damaged(f"{name} has changed since the run wrote it")
        if name.endswith(".csv") and data.partition(b"\n")[0].count(b",") >= MOST:
            raise Damaged(f"{name} has more than {MOST} columns")
        return data


def read_run(folder: Path) -> FoundRun:
    """Return what is found in a run folder."""
    path = folder / "status.json"
    if not os.path.lexists(path):
        return FoundRun(folder, {})
    if inside(folder, path.name) is None or not path.is_file():
        return FoundRun(folder, {}, f"{path.name} is not a file of this folder")
    status = read_status(folder)
    if not status:
        return FoundRun(folder, {}, f"{path.name} cannot be read")
    for name, (fits, wanted) in FIELDS.items():
        if name in status and not fits(status[name]):
            return FoundRun(folder, {}, f"{name} in {path.name} must be {wanted}")
    whole = json.dumps(status, ensure_ascii=False).encode(errors="replace")  # half characters can be written nowhere
    return FoundRun(folder, json.loads(whole))


def find_runs(folders: Iterable[Path]) -> list[FoundRun]:
    """Return all runs in and below the folders, in the order of their names, numbers by their value.

    The runs of a sweep are those in its list of jobs, in that order.
    """
    found: dict[Path, FoundRun] = {}
    for top in folders:
        if not top.is_dir():
            raise ValueError(f"folder={top}: no such folder, name run folders or folders that hold some")
        found |= {run.folder.resolve(): run for run in _below(top)}
    return list(found.values())


def _below(top: Path) -> Iterator[FoundRun]:
    """Yield the runs; a folder without a status is one, too, if Hydra has begun a run there."""
    for place, folders, files in os.walk(top):
        folder = Path(place)
        folders.sort(key=lambda name: (name.isdigit(), name.zfill(8)))
        if FILE in files:
            try:
                sweep = Sweep.read(folder)
            except ValueError as error:
                yield FoundRun(folder, {}, f"{error}, so its jobs are told by their folders")
            else:
                assert sweep is not None
                for job in sweep.jobs:
                    if inside(folder, job.name) is None:
                        yield FoundRun(folder / job.name, {}, "its folder leads out of the sweep")
                    else:  # what a job was to do that says nothing of itself is known from the list
                        run = read_run(folder / job.name)
                        status = {"status": "not started", "overrides": job.overrides} | run.status
                        yield FoundRun(run.folder, status, run.damage)
                folders.clear()
                continue
        if "status.json" in (*files, *folders) or (folder / ".hydra" / "config.yaml").exists():
            run = read_run(folder)
            if run.status.get("kind") != COLLECTION:
                yield run
            if run.status.get("kind") == RUN:
                folders.clear()
        for name in folders:
            if (folder / name).is_symlink() and (folder / name / "status.json").exists():
                yield FoundRun(folder / name, {}, "a link, name the folder that it leads to")
