"""Many run folders in, one set of tables, figures and a report out; works with whatever damaged runs are among them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from mhaprune.collecting.overview import index_of, table_of
from mhaprune.collecting.parts import Part, part_of, said
from mhaprune.collecting.run_names import names
from mhaprune.collecting.runs import COLLECTION, FoundRun, find_runs
from mhaprune.experiments.base import Experiment
from mhaprune.reporting.page import render
from mhaprune.reporting.plots import Plot, draw
from mhaprune.storage.store import RunFolder, read_status
from mhaprune.storage.sweeps import Sweep
from mhaprune.tables import Tables


def collect(folders: Iterable[Path], out: Path) -> list[str]:
    """Combine the runs found in `folders` into `out`; returns the findings in sentences, runs left out named last.

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
        called = names([run.folder for run in runs], [run.status for run in runs])
        parts = [part_of(*found) for found in zip(runs, called.labels, called.settings, strict=True)]
        tables: dict[str, pd.DataFrame] = {}
        plots: list[Plot] = []
        lines: list[str] = []
        kinds = list(dict.fromkeys(part.run.experiment for part in parts if part.why_not is None))
        for kind in kinds:
            assert kind is not None
            # Tables and figures of several experiments may have the same names.
            prefix = f"{kind.__name__.lower()}-" if len(kinds) > 1 else ""
            own = [part for part in parts if part.run.experiment is kind]
            compared = _compare(kind, [part for part in own if part.why_not is None], prefix)
            parts = [compared.without.get(part.label, part) for part in parts]
            plots += compared.plots
            lines += compared.lines
            tables |= {prefix + name: frame for name, frame in compared.tables.items()}
        left_out = [part for part in parts if part.why_not is not None]
        lines += [part.left_out() for part in left_out]
        lines += [f"{top} holds no run." for top in folders if not any(_within(part.run, top) for part in parts)]
        tables = {"runs": table_of(parts), **tables}
        for name, frame in tables.items():
            folder.write_table(name, frame)
        folder.write_figures(plots)
        facts = {"command": _command(folders, out), "runs": len(runs)}
        title = _title(parts, called.varying)
        folder.write("report.html", render(title, lines, plots, tables, facts).encode())
        folder.write("index.html", index_of(title, parts, called, folder.path).encode())
        folder.note(runs=len(runs), failed=[str(part.run.folder) for part in left_out])
    return lines


@dataclass(frozen=True)
class Compared:
    """What the runs of one experiment have in common."""

    tables: Tables
    plots: Sequence[Plot]
    lines: Sequence[str]
    without: Mapping[str, Part]
    """The runs that turned out not to fit, by their labels."""


def _compare(kind: type[Experiment], parts: Sequence[Part], prefix: str) -> Compared:
    """Compare runs. Those that nothing can be drawn from are left out, so that the others are compared all the same."""
    without: dict[str, Part] = {}
    common: list[str] = []
    plots: list[Plot] = []
    try:
        common, plots = _in_common(kind, parts, prefix)
    except Exception:  # tables may hold anything
        for part, why in _culprits(kind, parts):
            without[part.label] = Part(part.run, part.label, {}, why_not=f"damaged: its tables do not fit, {said(why)}")
        parts = [part for part in parts if part.label not in without]
        try:
            common, plots = _in_common(kind, parts, prefix)
        except Exception as error:
            common = [f"Runs of {kind.__name__.lower()} cannot be drawn together, {said(error)}."]
    lines = [*common, *(f"{part.label}: {part.sentence}" for part in parts)]
    return Compared(_combined(parts), plots, lines, without)


def _in_common(kind: type[Experiment], parts: Sequence[Part], prefix: str) -> tuple[list[str], list[Plot]]:
    if not parts:
        return [], []
    tables = _combined(parts)
    plots = [plot.named(prefix + plot.name) for plot in draw(kind.figures_over_runs, tables)]
    for plot in plots:
        assert plot.png  # drawn here, where an error is known to be of these runs
        assert plot.svg
    return list(kind.say_in_common(tables)), plots


def _culprits(kind: type[Experiment], parts: Sequence[Part]) -> list[tuple[Part, Exception]]:
    """The runs that cannot even be drawn for themselves, found by halves; there are few among many."""
    try:
        _in_common(kind, parts, "")
    except Exception as error:
        if len(parts) == 1:
            return [(parts[0], error)]
        middle = len(parts) // 2
        return [*_culprits(kind, parts[:middle]), *_culprits(kind, parts[middle:])]
    return []


def _combined(parts: Sequence[Part]) -> dict[str, pd.DataFrame]:
    found = dict.fromkeys(name for part in parts for name in part.tables)
    return {
        name: pd.concat([part.tables[name] for part in parts if name in part.tables], ignore_index=True)
        for name in found
    }


def _title(parts: Sequence[Part], varying: Sequence[str]) -> str:
    """What was run on which task, and what differs."""
    whole = [part.run for part in parts if part.why_not is None]
    done = ", ".join(dict.fromkeys(run.experiment.__name__.lower() for run in whole if run.experiment is not None))
    tasks = ", ".join(dict.fromkeys(str(run.status["identity"].get("task")) for run in whole))
    return f"{done or 'Runs'} on {tasks or 'no task'}" + (f", by {' and '.join(varying)}" if varying else "")


def _command(folders: Sequence[Path], out: Path) -> str:
    """How to do the same again: a sweep by its own command."""
    sweep = Sweep.read(folders[0]) if list(folders) == [out] else None
    collecting = shlex.join(["python", "scripts/collect.py", *map(str, folders), "--out", str(out)])
    return collecting if sweep is None else sweep.command


def _within(run: FoundRun, top: Path) -> bool:
    return run.folder == top or top in run.folder.parents
