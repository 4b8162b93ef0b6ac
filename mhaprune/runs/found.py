"""Run folders as they are found: each is read with care, as it may be damaged, unfinished or somebody else's."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.experiments.base import Experiment
from mhaprune.reporting.head_map import SmallMap
from mhaprune.reporting.headline import Number
from mhaprune.runs.jobs import FILE, Sweep
from mhaprune.settings.plugins import find_class
from mhaprune.settings.ranges import expected, fits
from mhaprune.storage.locks import read_bytes
from mhaprune.storage.seals import Damaged, checksum
from mhaprune.storage.store import inside, read_status, reason
from mhaprune.tables import Tables

RUN, COLLECTION = "run", "collection"
"""What a folder's `status.json` says under `kind`."""
MOST = 1000
"""Settings of a run, or columns of a table: more would take minutes, and no run has them."""
LARGEST = 10**12
"""The largest number of a status."""
PLAIN = dict[str, str | int | float | bool | None]
FIELDS: dict[str, Any] = {
    "status": str,
    "reason": str | None,
    "kind": str,
    "experiment": str,
    "identity": PLAIN,
    "trained_with": PLAIN,
    "seconds": float | None,
    "start": int,
    "findings": Sequence[str],
    "head_map": dict[str, str | Sequence[str]] | None,
    "overrides": Sequence[str],
    "code": dict[str, str | Sequence[str]],
    "files": dict[str, str],
}
"""The fields of a status that are read, and their types."""


@dataclass(frozen=True)
class FoundRun:
    """A run folder and what its status says; a job that died before it could write one has none."""

    folder: Path
    status: Mapping[str, Any]
    damage: str | None = None
    """What is wrong with it."""
    label: str = ""
    """The settings that tell it apart from the other runs."""
    setting: str = ""
    """The label without seed and folder."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """All that is known of its settings, by name."""
    tables: Tables = field(default_factory=dict)
    """Its tables as it wrote them."""
    headline: Sequence[Number] = ()
    """The numbers by which runs are compared first."""

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
            return ": ".join([state, *filter(None, [self.status.get("reason")])])
        if "experiment" not in self.status:
            return "too old: its status names no experiment, run it again"
        if self.experiment is None:
            return f"of an experiment that is not installed, {self.status['experiment']}"
        return None

    @property
    def sentence(self) -> str:
        """The first finding of the run."""
        return next(iter(self.status.get("findings", ())), "")

    @property
    def small_map(self) -> SmallMap | None:
        """The map of its heads; None for a run without one."""
        noted = self.status.get("head_map")
        return None if noted is None or self.why_not is not None else SmallMap(**noted)

    @property
    def trained_with(self) -> dict[str, Any]:
        """Facts of the training of its model, as columns; none where they are not known."""
        return {f"trained with {name}": value for name, value in self.status.get("trained_with", {}).items()}

    def check(self) -> None:
        """Raises Damaged if a file of the run is missing or not as the run wrote it."""
        for name in self.status.get("files", ()):
            self._read(name)

    def read(self) -> FoundRun:
        """Return the run with its tables and first numbers. One that nothing can be read from is damaged."""
        if self.why_not is not None or self.experiment is None:
            return self
        try:
            tables = {}
            for name in (name for name in self.status.get("files", ()) if name.endswith(".csv")):
                tables[name.removesuffix(".csv")] = pd.read_csv(io.BytesIO(self._read(name)), low_memory=False)
            return replace(self, tables=tables, headline=list(self.experiment.headline(tables)))
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
    for name, kind in FIELDS.items():
        if name in status and not fits(kind, status[name]):
            return FoundRun(folder, {}, f"{name} in {path.name} must be {expected(kind)}")
        value = status.get(name)
        if isinstance(value, list | dict) and len(value) > MOST:
            return FoundRun(folder, {}, f"{name} in {path.name} must hold at most {MOST}")
        if isinstance(value, int | float) and abs(value) > LARGEST:
            return FoundRun(folder, {}, f"{name} in {path.name} must be at most {LARGEST}")
    head_map = status.get("head_map") or {"title": "", "rows": []}
    if head_map.keys() != {"title", "rows"} or not set("".join(head_map["rows"])) <= set("01 "):
        return FoundRun(folder, {}, f"head_map in {path.name} must be a title and rows of 0, 1 and blanks")
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
                        yield replace(run, status={"status": "not started", "overrides": job.overrides, **run.status})
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
