"""What the runs of one experiment have in common: combined tables, figures and sentences; runs that do not fit are told
from those that do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from mhaprune.collecting.parts import Part, misfit, said
from mhaprune.collecting.varying import numbers_of, settings_of, varying_first
from mhaprune.experiments.base import Experiment
from mhaprune.reporting.headline import against_settings, means_in_words
from mhaprune.reporting.plots import MOST_RUNS, Plot, draw
from mhaprune.tables import LABEL, SETTING, Tables


@dataclass(frozen=True)
class Compared:
    """What the runs of one experiment have in common."""

    tables: Tables
    plots: Sequence[Plot]
    lines: Sequence[str]
    without: Mapping[str, Part]
    """The runs that turned out not to fit, by their labels."""


def compare(kind: type[Experiment], parts: Sequence[Part], prefix: str) -> Compared:
    """Compare runs. Those that nothing can be drawn from are left out, so that the others are compared all the same."""
    without: dict[str, Part] = {}
    common: list[str] = []
    plots: list[Plot] = []
    try:
        tables, common, plots = _in_common(kind, parts, prefix)
    except Exception:  # tables may hold anything
        without = {part.label: misfit(part, why) for part, why in _culprits(kind, parts)}
        parts = [part for part in parts if part.label not in without]
        try:
            tables, common, plots = _in_common(kind, parts, prefix)
        except Exception as error:
            tables = combined(parts)
            common = [f"Runs of {kind.__name__.lower()} cannot be drawn together, {said(error)}."]
    return Compared(tables, plots, [*common, *_one_by_one(parts)], without)


def _one_by_one(parts: Sequence[Part]) -> list[str]:
    if len(parts) > MOST_RUNS:
        return [f"What each of {len(parts)} runs found is in index.html."]
    return [f"{part.label}: {part.sentence}" for part in parts]


def _in_common(
    kind: type[Experiment], parts: Sequence[Part], prefix: str
) -> tuple[dict[str, pd.DataFrame], list[str], list[Plot]]:
    """The combined tables, the sentences and the figures. What the runs are compared by first comes first."""
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


def combined(parts: Sequence[Part]) -> dict[str, pd.DataFrame]:
    """The tables of all runs below each other, by name; columns in which no two runs differ come last."""
    names = dict.fromkeys(name for part in parts for name in part.tables)
    return {name: _with_labels([part for part in parts if name in part.tables], name) for name in names}


def _with_labels(parts: Sequence[Part], name: str) -> pd.DataFrame:
    if taken := [column for part in parts for column in (LABEL, SETTING) if column in part.tables[name]]:
        raise ValueError(f"a column is named {taken[0]}")
    keys = [(part.label, part.setting) for part in parts]
    table = pd.concat([part.tables[name] for part in parts], keys=keys, names=[LABEL, SETTING])
    return varying_first(table.reset_index([LABEL, SETTING]).reset_index(drop=True))
