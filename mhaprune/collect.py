"""Many run folders in, one set of tables, figures and a report out; works with whatever damaged runs are among them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from mhaprune.experiments.base import Experiment
from mhaprune.reporting.page import render
from mhaprune.reporting.plots import Plot, draw
from mhaprune.run_names import names
from mhaprune.runs import COLLECTION, FoundRun, find_runs
from mhaprune.seals import Damaged
from mhaprune.store import RunFolder, read_status, reason
from mhaprune.sweeps import Sweep
from mhaprune.tables import LABEL, SETTING, Tables


@dataclass(frozen=True)
class Part:
    """What a run adds to what is collected, or why it adds nothing."""

    run: FoundRun
    label: str
    tables: Tables
    """With the columns that tell the runs apart."""
    sentence: str = ""
    """The first finding of the run."""
    why_not: str | None = None

    def left_out(self) -> str:
        return f"{self.label} is not in here, {self.why_not} ({self.run.folder})."


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
        parts = [_part(*found) for found in zip(runs, called.labels, called.settings, strict=True)]
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
        tables = {"runs": _overview(parts), **tables}
        for name, frame in tables.items():
            folder.write_table(name, frame)
        folder.write_figures(plots)
        facts = {"command": _command(folders, out), "runs": len(runs)}
        folder.write("report.html", render(_title(parts, called.varying), lines, plots, tables, facts).encode())
        folder.note(runs=len(runs), failed=[str(part.run.folder) for part in left_out])
    return lines


def _part(run: FoundRun, label: str, setting: str) -> Part:
    if run.why_not is not None:
        return Part(run, label, {}, why_not=run.why_not)
    assert run.experiment is not None
    try:
        tables = run.tables()
        for frame in tables.values():
            frame.insert(0, LABEL, label)
            frame.insert(1, SETTING, setting)
        return Part(run, label, tables, next(iter(run.experiment.say(tables))))
    except Damaged as error:
        return Part(run, label, {}, why_not=f"damaged: {error}")
    except Exception as error:  # tables may hold anything
        return _misfit(run, label, error)


def _misfit(run: FoundRun, label: str, error: Exception) -> Part:
    return Part(run, label, {}, why_not=f"damaged: its tables do not fit, {_said(error)}")


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
    said: list[str] = []
    plots: list[Plot] = []
    try:
        said, plots = _in_common(kind, parts, prefix)
    except Exception:  # tables may hold anything
        for part, why in _culprits(kind, parts):
            without[part.label] = Part(
                part.run, part.label, {}, why_not=f"damaged: its tables do not fit, {_said(why)}"
            )
        parts = [part for part in parts if part.label not in without]
        try:
            said, plots = _in_common(kind, parts, prefix)
        except Exception as error:
            said = [f"Runs of {kind.__name__.lower()} cannot be drawn together, {_said(error)}."]
    lines = [*said, *(f"{part.label}: {part.sentence}" for part in parts)]
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


def _overview(parts: Sequence[Part]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            LABEL: part.label,
            "folder": str(part.run.folder),
            "state": part.why_not or "done",
            "seconds": part.run.status.get("seconds"),
            "start": part.run.status.get("start"),
        }
        for part in parts
    )


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


def _said(error: Exception) -> str:
    return " ".join(reason(error).split())
