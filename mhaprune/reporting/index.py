"""A page that lists runs: sorted by a click, filtered by words, in one file without server or network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote

import pandas as pd
from markupsafe import escape

from mhaprune.reporting.head_map import SmallMap
from mhaprune.reporting.page import fill

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
        """Whether runs differ in it. A run that failed has no numbers, which is no difference."""
        return len(set(self.cells) - ({""} if self.kind else set())) > 1


def render_index(
    title: str,
    rows: Sequence[Row],
    shared: Mapping[str, str] = MappingProxyType({}),
    facts: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The whole page. `shared` are the settings of all runs, `facts` say how to repeat this.

    Columns in which no two runs differ come last.
    """
    columns = _columns(rows)
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


def _columns(rows: Sequence[Row]) -> list[Column]:
    """The state, the settings and the numbers of all runs."""
    settings = dict.fromkeys(name for row in rows for name in row.settings)
    numbers = dict.fromkeys(name for row in rows for name in row.numbers)
    return [
        Column("state", [row.state for row in rows]),
        *(Column(name, [row.settings.get(name, "") for row in rows]) for name in settings),
        *(Column(name, [_shown(row.numbers.get(name)) for row in rows], "n") for name in numbers),
    ]


def thumbnail(small: SmallMap | None) -> str:
    """The map of heads as a small picture of plain squares: full where a head stays, hollow where it can go."""
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
