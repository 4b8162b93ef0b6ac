"""Run folders found on disk. They are read with care: a folder may be damaged, unfinished or from another source."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mhaprune.lab.experiments.base import Experiment
from mhaprune.lab.reporting.head_map import SmallMap
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.sentences import POOR_MODEL
from mhaprune.lab.runs.run_folder import read_status, reason
from mhaprune.settings.options import ConfigError, settings_of
from mhaprune.settings.plugins import find_class
from mhaprune.settings.ranges import expected, fits
from mhaprune.storage.locks import read_bytes
from mhaprune.storage.seals import Damaged, checksum
from mhaprune.storage.store import inside, read_table
from mhaprune.tables import Tables

RUN, COLLECTION = "run", "collection"
"""The two values of `kind` in a `status.json`: the folder holds a run, or a collection of runs."""
PLAIN = dict[str, str | int | float | bool | None]
FIELDS: dict[str, Any] = {
    "status": str,
    "reason": str | None,
    "kind": str,
    "experiment": str,
    "identity": PLAIN,
    "trained_with": PLAIN,
    "started": str,
    "seconds": float | None,
    "findings": Sequence[str],
    "head_map": dict[str, str | Sequence[str]] | None,
    "overrides": Sequence[str],
    "code": dict[str, str | Sequence[str]],
    "files": dict[str, str],
}
"""The fields of a status that are read, and their types."""


@dataclass(frozen=True)
class FoundRun:
    """A run folder and its status. The status is empty for a job that died before a status was written."""

    folder: Path
    status: Mapping[str, Any]
    damage: str | None = None
    """A description of the damage; None for an undamaged run."""
    label: str = ""
    """The settings that distinguish the run from the other runs."""
    setting: str = ""
    """The label without seed and folder."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """All known settings of the run, by name."""
    tables: Tables = field(default_factory=dict)
    """The tables of the run as they were written."""
    headline: Sequence[Number] = ()
    """The headline numbers of the run: a comparison of runs shows them first."""

    @property
    def place(self) -> str:
        """The folder as text; bytes that are not UTF-8 are replaced."""
        return os.fsencode(self.folder).decode(errors="replace")

    @cached_property
    def experiment(self) -> type[Experiment] | None:
        """The class of the experiment; None if it is unknown here. Its module may have another name since the run."""
        target = self.status.get("experiment", "")
        found, name = find_class(Experiment, target), target.rpartition(".")[2]
        if found is None and target.startswith("mhaprune.") and name.isidentifier():
            with suppress(ConfigError):  # no experiment of this name
                found = find_class(Experiment, settings_of("experiment", name.lower())["_target_"])
        return found

    @property
    def why_not(self) -> str | None:
        """The reason why the run is left out of a comparison; None for a run that can be compared."""
        if self.damage is not None:
            return f"damaged: {self.damage}"
        if (state := self.status.get("status", "no status")) != "done":
            why = self.status.get("reason")
            return why if why == "interrupted" else ": ".join(filter(None, [state, why]))
        if "experiment" not in self.status:
            return "too old: its status names no experiment, run it again"
        if self.experiment is None:
            return f"of an experiment that is not installed, {self.status['experiment']}"
        return None

    @property
    def sentence(self) -> str:
        """The first finding of the run, as a sentence."""
        return next(iter(self.status.get("findings", ())), "")

    @property
    def poor(self) -> bool:
        """True if the run warns that its model is poor at its task."""
        return any(text.startswith(POOR_MODEL) for text in self.status.get("findings", ()))

    @property
    def small_map(self) -> SmallMap | None:
        """The map of the heads; None for a run without one."""
        noted = self.status.get("head_map")
        return None if noted is None or self.why_not is not None else SmallMap(**noted)

    @property
    def trained_with(self) -> dict[str, Any]:
        """Facts of the model's training as columns; empty if they are not known."""
        return {f"trained with {name}": value for name, value in self.status.get("trained_with", {}).items()}

    def check(self) -> None:
        """Raise Damaged if a file of the run is missing or has changed since the run wrote it."""
        for name in self.status.get("files", ()):
            self._read(name)

    def read(self) -> FoundRun:
        """Return the run with its tables and headline numbers, or with `damage` if they cannot be read."""
        if self.why_not is not None or self.experiment is None:
            return self
        try:
            tables = {}
            for name in (name for name in self.status.get("files", ()) if name.endswith(".csv")):
                tables[name.removesuffix(".csv")] = _table(name, self._read(name))
            headline = list(self.experiment.headline(tables))
            empty = next((name for name, table in tables.items() if table.empty), None)
            if empty is not None and not headline and self.experiment.headline is not Experiment.headline:
                raise Damaged(f"{empty}.csv has no rows")
            for number in headline:
                if not number.possible:
                    raise Damaged(f"{number.name} is {number.value:g}, of {number.whole:g} for the whole model")
            return replace(self, tables=tables, headline=headline)
        except Damaged as error:
            return replace(self, damage=str(error))
        except Exception as error:  # tables may hold anything
            return replace(self, damage=f"its tables do not fit, {reason(error)}")

    def _read(self, name: str) -> bytes:
        path = inside(self.folder, name)
        if path is None:
            raise Damaged(f"{name} is not a file of this folder")
        try:
            data = read_bytes(path)
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from None
        if checksum(data) != self.status["files"][name]:
            raise Damaged(f"{name} has changed since the run wrote it")
        return data


def _table(name: str, data: bytes) -> pd.DataFrame:
    """Return the table in a file. Raises Damaged for a table that no run writes: with an infinite number, or with a
    measurement twice."""
    table = read_table(data)
    measured = table.select_dtypes("float")
    for column in measured:
        if np.isinf(measured[column]).any():
            raise Damaged(f"{name} has an infinite {column} in row {int(np.isinf(measured[column]).argmax()) + 1}")
    if len(measured.columns) and table.duplicated().any():
        raise Damaged(f"{name} has row {int(table.duplicated().argmax()) + 1} twice")
    return table


def read_run(folder: Path) -> FoundRun:
    """Return the run in a folder; a status that does not fit `FIELDS` counts as damage."""
    path = folder / "status.json"
    if not os.path.lexists(path):
        return FoundRun(folder, {})
    if inside(folder, path.name) is None or not path.is_file():
        return FoundRun(folder, {}, f"{path.name} is not a file of this folder")
    status = read_status(folder)
    if not status:
        return FoundRun(folder, {}, f"{path.name} cannot be read")
    for name, kind in FIELDS.items():
        if name in status and not fits(kind, status[name]):
            return FoundRun(folder, {}, f"{name} in {path.name} must be {expected(kind)}")
    head_map = status.get("head_map") or {"title": "", "rows": []}
    if head_map.keys() != {"title", "rows"} or not set("".join(head_map["rows"])) <= set("01 "):
        return FoundRun(folder, {}, f"head_map in {path.name} must be a title and rows of 0, 1 and blanks")
    whole = json.dumps(status, ensure_ascii=False).encode(errors="replace")  # lone surrogates cannot be written
    return FoundRun(folder, json.loads(whole))


def find_runs(folders: Iterable[Path]) -> list[FoundRun]:
    """Return all runs in and below these folders, one folder after the other.

    In a folder, runs are sorted by name, with 2 before 10.
    """
    runs: dict[Path, FoundRun] = {}
    for top in folders:
        if not top.is_dir():
            raise ValueError(f"folder={top}: no such folder, name run folders or folders that hold some")
        runs |= {run.folder.resolve(): run for run in _below(top)}
    return list(runs.values())


def _below(top: Path) -> Iterator[FoundRun]:
    """Yield the runs below a folder. A folder without a status is a run too if Hydra has begun one there."""
    for place, folders, files in os.walk(top):
        folder = Path(place)
        folders.sort(key=_by_numbers)
        if "status.json" in (*files, *folders) or (folder / ".hydra" / "config.yaml").exists():
            run = read_run(folder)
            if run.status.get("kind") != COLLECTION:
                yield run
            if run.status.get("kind") == RUN:
                folders.clear()
        for name in folders:
            if (folder / name).is_symlink() and (folder / name / "status.json").exists():
                yield FoundRun(folder / name, {}, "a link, name the folder that it leads to")


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names with their numbers as numbers: `heads_2` before `heads_10`."""
    return [(int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]
