"""Many run folders in, one set of tables, figures and a report out; works with whatever failed runs are among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.experiments.base import Experiment
from mhaprune.plugins import find_class
from mhaprune.reporting.page import render
from mhaprune.reporting.plots import Plot, draw
from mhaprune.store import RunFolder, read_status
from mhaprune.tables import LABEL, SETTING

RUN, COLLECTION = "run", "collection"
"""What a folder's `status.json` says under `kind`."""


@dataclass(frozen=True)
class FoundRun:
    """A run folder and what its status says; a job that died before it could write one has none."""

    folder: Path
    status: dict[str, Any]

    @property
    def done(self) -> bool:
        return self.status.get("status") == "done"

    @cached_property
    def experiment(self) -> type[Experiment] | None:
        """The experiment that was run; None for one that this mhaprune does not know."""
        name = self.status.get("experiment")
        return find_class(Experiment, name) if isinstance(name, str) else None

    @property
    def why_not(self) -> str | None:
        """Why the run is not among those compared; None for one that is."""
        if not self.done:
            state = str(self.status.get("status", "no status"))
            return f"{state}: {self.status['reason']}" if self.status.get("reason") else state
        if "experiment" not in self.status:
            return "too old: its status names no experiment, run it again"
        if self.experiment is None:
            return f"of an experiment that is not installed, {self.status['experiment']}"
        return None

    @property
    def state(self) -> str:
        return self.why_not or "done"


def find_runs(folders: Iterable[Path]) -> list[FoundRun]:
    """All runs in and below the folders, in the order of their names, numbers by their value."""
    found: dict[Path, FoundRun] = {}
    for top in folders:
        if not top.is_dir():
            raise ValueError(f"folder={top}: no such folder, name run folders or folders that hold some")
        for marker in [*top.rglob("status.json"), *top.rglob(".hydra/config.yaml")]:
            folder = marker.parent if marker.name == "status.json" else marker.parent.parent
            status = read_status(folder)
            if status.get("kind") != COLLECTION:
                found[folder.resolve()] = FoundRun(folder, status)
    return sorted(found.values(), key=lambda run: [(part.isdigit(), part.zfill(8)) for part in run.folder.parts])


def collect(folders: Iterable[Path], out: Path, title: str = "Runs compared") -> list[str]:
    """Combine the runs found in `folders` into `out`; returns the findings in sentences, failed runs named first.

    Every experiment says and draws what its own runs have in common. Raises ValueError where no run is found, and where
    `out` is itself a run, whose files it would replace.
    """
    folders = list(folders)
    if read_status(out).get("kind", COLLECTION) != COLLECTION:
        raise ValueError(f"out={out}: is the folder of a run, name one of its own for what is collected")
    runs = find_runs(folders)
    if not runs:
        raise ValueError(f"folder={', '.join(map(str, folders))}: holds no run, a run folder has a status.json")
    with RunFolder(out).recorded() as folder:
        folder.note(kind=COLLECTION)
        places = [run.folder for run in runs]
        labels, settings = (dict(zip(places, names, strict=True)) for names in _names(runs))
        compared = [run for run in runs if run.why_not is None]
        left_out = [run for run in runs if run.why_not is not None]
        kinds = list(dict.fromkeys(run.experiment for run in compared if run.experiment is not None))
        tables: dict[str, pd.DataFrame] = {"runs": _overview(runs, labels)}
        plots: list[Plot] = []
        lines = [f"{labels[run.folder]} is not in here, {run.why_not} ({run.folder})." for run in left_out]
        for kind in kinds:
            own = dict(_combined([run for run in compared if run.experiment is kind], labels, settings))
            # Tables and figures of several experiments may have the same names.
            prefix = f"{kind.__name__.lower()}-" if len(kinds) > 1 else ""
            plots += [plot.named(prefix + plot.name) for plot in draw(kind.figures_over_runs, own)]
            lines += kind.say_over_runs(own)
            tables |= {prefix + name: frame for name, frame in own.items()}
        for name, frame in tables.items():
            folder.write_table(name, frame)
        folder.write_figures(plots)
        facts = {"command": f"python scripts/collect.py {' '.join(map(str, folders))} --out {out}", "runs": len(runs)}
        folder.write("report.html", render(title, lines, plots, tables, facts).encode())
        folder.note(runs=len(runs), failed=[str(run.folder) for run in left_out])
    return lines


def _overview(runs: Sequence[FoundRun], labels: Mapping[Path, str]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            LABEL: labels[run.folder],
            "folder": str(run.folder),
            "state": run.state,
            "seconds": run.status.get("seconds"),
        }
        for run in runs
    )


def _combined(
    runs: Sequence[FoundRun], labels: Mapping[Path, str], settings: Mapping[Path, str]
) -> Iterator[tuple[str, pd.DataFrame]]:
    names = dict.fromkeys(name for run in runs for name in run.status.get("files", []) if name.endswith(".csv"))
    for name in names:
        parts = []
        for run in runs:
            if name in run.status["files"]:
                frame = pd.read_csv(run.folder / name)
                frame.insert(0, LABEL, labels[run.folder])
                frame.insert(1, SETTING, settings[run.folder])
                parts.append(frame)
        yield name.removesuffix(".csv"), pd.concat(parts, ignore_index=True)


def _names(runs: list[FoundRun]) -> tuple[list[str], list[str]]:
    """The label and the setting of every run.

    A label holds what tells the runs apart: the settings that differ between them and, where that is not enough, the
    folder. A setting holds the same without seed and folder.
    """
    settings = [_settings(run.status) for run in runs]
    names = dict.fromkeys(name for mine in settings for name in mine)
    varying = [name for name in names if len({mine.get(name) for mine in settings if mine}) > 1]
    labels = [_joined(mine, varying) for mine in settings]
    depth = 1
    while len({run.folder.parts[-depth:] for run in runs}) < len(runs):
        depth += 1
    unique = [
        label
        if label and labels.count(label) == 1
        else ", ".join(filter(None, [label, "/".join(run.folder.parts[-depth:])]))
        for label, run in zip(labels, runs, strict=True)
    ]
    return unique, [_joined(mine, [name for name in varying if name != "seed"]) for mine in settings]


def _joined(settings: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={settings[name]}" for name in names if name in settings)


def _settings(status: Mapping[str, Any]) -> dict[str, str]:
    """What a run was: its identity, and whatever else its command line set."""
    settings = {name: str(value) for name, value in status.get("identity", {}).items() if name != "run"}
    for override in status.get("overrides", []) if settings else []:
        key, _, value = override.partition("=")
        known = key.removeprefix("model.") in settings
        if not known and key != "experiment" and key.split(".")[0] not in ("cache", "hydra"):
            settings[key] = value
    return settings
