"""All runs at a glance: as a table, and as a page to sort and to filter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.collecting.parts import Part
from mhaprune.collecting.varying import varying_first
from mhaprune.reporting.index import Row, render_index
from mhaprune.storage.store import inside
from mhaprune.tables import LABEL


def title_of(parts: Sequence[Part], varying: Sequence[str]) -> str:
    """What was run on which task, and what differs: `ablate on sort, by num_heads, 3 seeds`."""
    whole = [part for part in parts if part.why_not is None]
    kinds = dict.fromkeys(part.run.experiment for part in whole)
    done = ", ".join(kind.__name__.lower() for kind in kinds if kind is not None)
    tasks = _listed(list(dict.fromkeys(part.settings.get("task", "no task") for part in whole)) or ["no task"])
    title = f"{done or 'Runs'} on {tasks}"
    settings = [name for name in varying if name not in ("experiment", "task", "seed")]
    if settings:
        title += f", by {_listed(settings)}"
    seeds = {part.settings["seed"] for part in parts if "seed" in part.settings}
    return title + (f", {len(seeds)} seeds" if len(seeds) > 1 else "")


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def table_of(parts: Sequence[Part], varying: Sequence[str]) -> pd.DataFrame:
    """A row per run: its settings, its first numbers, how it ended, what trained its model, and where it is.

    Runs of one `start` were timed side by side.
    """
    rows = []
    for part in parts:
        settings = {name: part.settings.get(name) for name in (*varying, *part.settings)}
        numbers = {number.name: number.value for number in part.headline}
        ended: dict[str, Any] = {"state": part.why_not or "done"}
        ended |= {name: part.run.status.get(name) for name in ("seconds", "start")}
        own = {LABEL: part.label} | settings | numbers | ended | trained_with(part)
        rows.append(own | {"folder": part.run.place})
    return varying_first(pd.DataFrame(rows))


def trained_with(part: Part) -> dict[str, Any]:
    """What trained the model of a run, as columns; nothing where that is not known."""
    return {f"trained with {name}": value for name, value in part.run.status.get("trained_with", {}).items()}


def index_of(title: str, parts: Sequence[Part], varying: Sequence[str], facts: Mapping[str, str], out: Path) -> str:
    """The page: each run's state, the settings that vary, its first numbers, its map of heads, a link to its report."""
    known = [{**part.settings, **trained_with(part)} for part in parts]
    shared = _shared(known, varying)
    names = dict.fromkeys([*varying, *(name for part in parts for name in trained_with(part) if name not in shared)])
    rows = []
    for part, settings in zip(parts, known, strict=True):
        report = part.run.folder / "report.html"
        there = inside(part.run.folder, report.name) is not None and report.is_file()
        numbers = {number.name: number.value for number in part.headline}
        rows.append(
            Row(
                label=part.label,
                state=(part.why_not or "done").partition(":")[0],
                link=os.path.relpath(report, out) if there else None,
                settings={name: str(settings.get(name, "")) for name in names},
                numbers={**numbers, "seconds": part.run.status.get("seconds")},
                small_map=part.small_map,
                said=part.sentence or part.why_not or "",
            )
        )
    return render_index(title, rows, shared, facts)


def _shared(known: Sequence[Mapping[str, Any]], varying: Sequence[str]) -> dict[str, str]:
    """The settings that all runs have in common, as far as they are known."""
    values: dict[str, set[str]] = {}
    for settings in known:
        for name, value in settings.items():
            values.setdefault(name, set()).add(str(value))
    return {name: next(iter(own)) for name, own in values.items() if len(own) == 1 and name not in varying}
