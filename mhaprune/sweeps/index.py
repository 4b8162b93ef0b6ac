"""A page that lists runs: sorted by a click, filtered by words, in one file without server or network."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote

import pandas as pd
from markupsafe import escape

from mhaprune.reporting.head_map import SmallMap
from mhaprune.reporting.page import fill
from mhaprune.storage.store import inside
from mhaprune.sweeps.parts import Part

TILE = 7
"""Pixels of the side of a head in a thumbnail."""
KINDS = {"1": "s", "0": "g"}
"""The classes of its squares."""


class Row(NamedTuple):
    """A run."""

    label: str
    state: str
    """In a word or two."""
    link: str | None
    """The path of its report, from the page."""
    settings: Mapping[str, str]
    """Those that vary."""
    numbers: Mapping[str, float | None]
    """What it is judged by first; rows may have different ones."""
    small_map: SmallMap | None
    """Which heads stay."""
    said: str
    """What it found, or why it found nothing."""


class Column(NamedTuple):
    """A column of the table of runs, with its cells as they are shown."""

    name: str
    cells: list[str]
    kind: str = ""
    """The class of the cells: `n` for numbers."""

    @property
    def varies(self) -> bool:
        """True if runs differ in it. A run that failed has no numbers, which is no difference."""
        return len(set(self.cells) - ({""} if self.kind else set())) > 1


def index_of(title: str, parts: Sequence[Part], varying: Sequence[str], facts: Mapping[str, str], out: Path) -> str:
    """Return the page: each run's state, the settings that vary, its first numbers, its map of heads, a link to its
    report."""
    known = [{**part.settings, **part.trained_with} for part in parts]
    values: dict[str, set[str]] = {}
    for settings in known:
        for name, value in settings.items():
            values.setdefault(name, set()).add(str(value))
    shared = {name: next(iter(own)) for name, own in values.items() if len(own) == 1 and name not in varying}
    names = dict.fromkeys([*varying, *(name for part in parts for name in part.trained_with if name not in shared)])
    rows = []
    for part, settings in zip(parts, known, strict=True):
        report = part.run.folder / "report.html"
        there = inside(part.run.folder, report.name) is not None and report.is_file()
        rows.append(
            Row(
                label=part.label,
                state=(part.why_not or "done").partition(":")[0],
                link=os.path.relpath(report, out) if there else None,
                settings={name: str(settings.get(name, "")) for name in names},
                numbers={each.name: each.value for each in part.headline} | {"seconds": part.run.status.get("seconds")},
                small_map=part.small_map,
                said=part.sentence or part.why_not or "",
            )
        )
    return render_index(title, rows, shared, facts)


def render_index(
    title: str,
    rows: Sequence[Row],
    shared: Mapping[str, str] = MappingProxyType({}),
    facts: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the whole page. `shared` are the settings of all runs, `facts` say how to repeat this.

    Columns in which no two runs differ come last.
    """
    settings = dict.fromkeys(name for row in rows for name in row.settings)
    numbers = dict.fromkeys(name for row in rows for name in row.numbers)
    columns = [
        Column("state", [row.state for row in rows]),
        *(Column(name, [row.settings.get(name, "") for row in rows]) for name in settings),
        *(Column(name, [_shown(row.numbers.get(name)) for row in rows], "n") for name in numbers),
    ]
    return fill(
        "index",
        {"url": partial(quote, errors="surrogateescape"), "thumbnail": thumbnail},
        title=title,
        rows=rows,
        states=Counter(row.state for row in rows),
        first=[column for column in columns if column.varies],
        last=[column for column in columns if not column.varies],
        maps=any(row.small_map is not None for row in rows),
        shared=shared,
        facts=facts,
    )


def thumbnail(small: SmallMap | None) -> str:
    """Draw the map of heads as a small picture of plain squares: full where a head stays, hollow where it can go."""
    if small is None or not any(small.rows):
        return ""
    side = TILE - 2
    paths = []  # one for all squares of a kind: a page of many runs opens faster than with an element for each
    for tile, kind in KINDS.items():
        corners = [(x, y) for y, row in enumerate(small.rows) for x, each in enumerate(row) if each == tile]
        squares = "".join(f"M{x * TILE + 1} {y * TILE + 1}h{side}v{side}h-{side}z" for x, y in corners)
        paths.append(f'<path class="{kind}" d="{squares}"/>' if squares else "")
    width, height = max(map(len, small.rows)) * TILE, len(small.rows) * TILE
    title = escape(small.title)
    return f'<svg width="{width}" height="{height}" role="img"><title>{title}</title>{"".join(paths)}</svg>'


def _shown(value: float | None) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.4g}" if math.isfinite(value) else str(value)
