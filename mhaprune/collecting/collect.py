"""Many run folders in, one set of tables, figures and a report out; works with whatever damaged runs are among them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.collecting.comparing import compare
from mhaprune.collecting.overview import index_of, table_of, title_of
from mhaprune.collecting.parts import part_of
from mhaprune.collecting.run_names import names
from mhaprune.collecting.runs import COLLECTION, FoundRun, find_runs
from mhaprune.reporting.page import render
from mhaprune.reporting.plots import Plot
from mhaprune.storage.store import RunFolder, read_status
from mhaprune.storage.sweeps import Sweep

FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.]+(e[+-]?\d+)?$)")
"""The beginning of a text that is no number and that a spreadsheet computes."""


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
        called = names([Path(run.place) for run in runs], [run.status for run in runs])
        each = zip(runs, called.labels, called.settings, called.details, strict=True)
        parts = [part_of(*found) for found in each]
        tables: dict[str, pd.DataFrame] = {}
        plots: list[Plot] = []
        lines: list[str] = []
        kinds = list(dict.fromkeys(part.run.experiment for part in parts if part.why_not is None))
        for kind in kinds:
            assert kind is not None
            # Tables and figures of several experiments may have the same names.
            prefix = f"{kind.__name__.lower()}-" if len(kinds) > 1 else ""
            own = [part for part in parts if part.run.experiment is kind]
            compared = compare(kind, [part for part in own if part.why_not is None], prefix)
            parts = [compared.without.get(part.label, part) for part in parts]
            plots += compared.plots
            lines += compared.lines
            tables |= {prefix + name: frame for name, frame in compared.tables.items()}
        left_out = [part for part in parts if part.why_not is not None]
        lines += [part.left_out() for part in left_out]
        lines += [f"{top} holds no run." for top in folders if not any(_within(part.run, top) for part in parts)]
        tables = {"runs": table_of(parts, called.varying), **tables}
        for name, frame in tables.items():
            folder.write_table(name, no_formulas(frame))
        folder.write_figures(plots)
        facts = _how_to_repeat(folders, out) | {"runs": str(len(runs))}
        title = title_of(parts, called.varying)
        folder.write("report.html", render(title, lines, plots, tables, facts).encode())
        folder.write("index.html", index_of(title, parts, called.varying, facts, folder.path).encode())
        folder.note(runs=len(runs), failed=[part.run.place for part in left_out])
    return lines


def no_formulas(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table without a text that a spreadsheet would take for a formula: a quote stands before it."""

    def plain(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value

    texts = frame.select_dtypes(exclude=["number", "bool"])
    changed = {
        name: texts[name].replace({v: plain(v) for v in texts[name].unique() if plain(v) is not v}) for name in texts
    }
    return frame.assign(**changed).rename(columns=plain)


def _how_to_repeat(folders: Sequence[Path], out: Path) -> dict[str, str]:
    """The commands: those of the sweeps that are collected, and the one that collects them elsewhere."""
    sweeps = [sweep.command for top in folders if (sweep := _sweep_in(top)) is not None]
    collecting = shlex.join(["python", "scripts/collect.py", *map(str, folders), "--out", str(out)])
    commands = {"command": "; ".join(sweeps)} if sweeps else {}
    return commands if sweeps and folders == [out] else commands | {"collected by": collecting}


def _sweep_in(folder: Path) -> Sweep | None:
    """None also for a list of jobs that is damaged."""
    try:
        return Sweep.read(folder)
    except ValueError:
        return None


def _within(run: FoundRun, top: Path) -> bool:
    return run.folder == top or top in run.folder.parents
