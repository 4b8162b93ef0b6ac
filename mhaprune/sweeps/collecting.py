"""Many run folders in, one set of tables, figures and a report out; works with whatever damaged runs are among them."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.experiments.base import Experiment
from mhaprune.reporting.headline import against_settings, means_in_words
from mhaprune.reporting.page import render
from mhaprune.reporting.plots import MOST_RUNS, Plot, draw
from mhaprune.storage.store import RunFolder, in_one_line, read_status, reason
from mhaprune.sweeps.index import index_of
from mhaprune.sweeps.jobs import Sweep
from mhaprune.sweeps.parts import Part, named, numbers_of, settings_of, table_of, title_of, varying_first, with_findings
from mhaprune.sweeps.runs import COLLECTION, find_runs
from mhaprune.tables import LABEL, SETTING, Tables

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
        parts, varying = named(runs)
        parts = [with_findings(part) for part in parts]
        tables: dict[str, pd.DataFrame] = {}
        plots: list[Plot] = []
        lines: list[str] = []
        kinds = list(dict.fromkeys(part.run.experiment for part in parts if part.why_not is None))
        for kind in kinds:
            assert kind is not None
            # Tables and figures of several experiments may have the same names.
            prefix = f"{kind.__name__.lower()}-" if len(kinds) > 1 else ""
            own = [part for part in parts if part.run.experiment is kind and part.why_not is None]
            compared = compare(kind, own, prefix)
            parts = [compared.without.get(part.label, part) for part in parts]
            plots += compared.plots
            lines += compared.lines
            tables |= {prefix + name: frame for name, frame in compared.tables.items()}
        left_out = [part for part in parts if part.why_not is not None]
        lines += [f"{part.label} is not in here, {part.why_not} ({part.run.place})." for part in left_out]
        held = {place for run in runs for place in (run.folder, *run.folder.parents)}
        lines += [f"{top} holds no run." for top in folders if top not in held]
        tables = {"runs": table_of(parts, varying), **tables}
        for name, frame in tables.items():
            folder.write_table(name, no_formulas(frame))
        folder.write_figures(plots)
        facts = _how_to_repeat(folders, out) | {"runs": str(len(runs))}
        title = title_of(parts, varying)
        folder.write("report.html", render(title, lines, plots, tables, facts).encode())
        folder.write("index.html", index_of(title, parts, varying, facts, folder.path).encode())
        folder.note(runs=len(runs), failed=[part.run.place for part in left_out])
    return lines


@dataclass(frozen=True)
class Comparison:
    """The tables, figures and sentences that the runs of one experiment have in common."""

    tables: Tables
    plots: Sequence[Plot]
    lines: Sequence[str]
    without: Mapping[str, Part]
    """The runs that turned out not to fit, by their labels."""


def compare(kind: type[Experiment], parts: Sequence[Part], prefix: str) -> Comparison:
    """Compare runs. Those that nothing can be drawn from are left out, so that the others are compared all the same."""
    without: dict[str, Part] = {}
    plots: list[Plot] = []
    try:
        tables, common, plots = _in_common(kind, parts, prefix)
    except Exception:  # tables may hold anything
        without = {part.label: part for part in _culprits(kind, parts)}
        parts = [part for part in parts if part.label not in without]
        try:
            tables, common, plots = _in_common(kind, parts, prefix)
        except Exception as error:
            tables = combined(parts)
            common = [f"Runs of {kind.__name__.lower()} cannot be drawn together, {in_one_line(reason(error))}."]
    many = [f"What each of {len(parts)} runs found is in index.html."]
    each = [f"{part.label}: {part.sentence}" for part in parts]
    return Comparison(tables, plots, [*common, *(many if len(parts) > MOST_RUNS else each)], without)


def _in_common(kind: type[Experiment], parts: Sequence[Part], prefix: str) -> tuple[Tables, list[str], list[Plot]]:
    """Return the combined tables, the sentences and the figures. What the runs are compared by first comes first."""
    if not parts:
        return {}, [], []
    tables, settings = combined(parts), settings_of(parts)
    numbers = numbers_of(parts, settings)
    figures = (lambda _: against_settings(numbers, settings), *kind.figures_over_runs)
    plots = [plot.named(prefix + plot.name) for plot in draw(figures, tables)]
    for plot in plots:
        assert plot.png  # drawn here, where an error is known to be of these runs
        assert plot.svg
    return tables, [*means_in_words(numbers, settings), *kind.say_in_common(tables)], plots


def _culprits(kind: type[Experiment], parts: Sequence[Part]) -> list[Part]:
    """Return the runs that cannot even be drawn for themselves, found by halves; there are few among many."""
    try:
        _in_common(kind, parts, "")
    except Exception as error:
        if len(parts) == 1:
            return [parts[0].misfit(error)]
        middle = len(parts) // 2
        return [*_culprits(kind, parts[:middle]), *_culprits(kind, parts[middle:])]
    return []


def combined(parts: Sequence[Part]) -> dict[str, pd.DataFrame]:
    """Put the tables of all runs below each other, by name; columns in which no two runs differ come last."""
    names = dict.fromkeys(name for part in parts for name in part.tables)
    return {name: _with_labels([part for part in parts if name in part.tables], name) for name in names}


def _with_labels(parts: Sequence[Part], name: str) -> pd.DataFrame:
    if taken := [column for part in parts for column in (LABEL, SETTING) if column in part.tables[name]]:
        raise ValueError(f"a column is named {taken[0]}")
    keys = [(part.label, part.setting) for part in parts]
    table = pd.concat([part.tables[name] for part in parts], keys=keys, names=[LABEL, SETTING])
    return varying_first(table.reset_index([LABEL, SETTING]).reset_index(drop=True))


def no_formulas(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table without a text that a spreadsheet would take for a formula: a quote stands before it."""

    def plain(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value

    for name in frame.select_dtypes(exclude=["number", "bool"]):
        if any(plain(value) is not value for value in frame[name].unique()):
            frame = frame.assign(**{name: frame[name].map(plain)})
    return frame.rename(columns=plain)


def _how_to_repeat(folders: Sequence[Path], out: Path) -> dict[str, str]:
    """Return the commands: those of the sweeps that are collected, and the one that collects them elsewhere."""
    sweeps = []
    for top in folders:
        with suppress(ValueError):  # a list of jobs that is damaged
            sweeps += [sweep.command] if (sweep := Sweep.read(top)) is not None else []
    collecting = shlex.join(["python", "scripts/collect.py", *map(str, folders), "--out", str(out)])
    commands = {"command": "; ".join(sweeps)} if sweeps else {}
    return commands if sweeps and folders == [out] else commands | {"collected by": collecting}
