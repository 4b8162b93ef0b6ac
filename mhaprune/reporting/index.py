"""A page that lists runs: sorted by a click, filtered by words, in one file without server or network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import escape

from mhaprune.reporting.verdict import Verdict
from mhaprune.tables import blocks_in

TILE = 7
"""Pixels of the side of a head in a thumbnail."""


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
    verdict: Verdict | None
    """Which heads stay."""
    said: str
    """What it found, or why it found nothing."""


def render_index(title: str, rows: Sequence[Row]) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("mhaprune.reporting", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"shown": _shown, "url": lambda path: quote(path), "thumbnail": thumbnail}
    states: dict[str, int] = {}
    for row in rows:
        states[row.state] = states.get(row.state, 0) + 1
    return environment.get_template("index.html.jinja").render(
        title=title,
        rows=rows,
        states=states,
        settings=list(dict.fromkeys(name for row in rows for name in row.settings)),
        numbers=list(dict.fromkeys(name for row in rows for name in row.numbers)),
        maps=any(row.verdict is not None for row in rows),
    )


def thumbnail(verdict: Verdict | None) -> str:
    """The map of heads as a small picture of plain squares: full where a head stays, hollow where it can go."""
    if verdict is None or verdict.heads.empty:
        return ""
    heads = verdict.heads
    rows = {block: row for row, block in enumerate(blocks_in(heads))}
    tiles = [_tile(head, rows[head["site"], head["layer"]]) for head in heads.to_dict("records")]
    width, height = (int(heads["head"].max()) + 1) * TILE, len(rows) * TILE
    title = escape(verdict.title)
    return f'<svg width="{width}" height="{height}" role="img"><title>{title}</title>{"".join(tiles)}</svg>'


def _tile(head: Mapping[str, object], row: int) -> str:
    kind = "s" if head["stays"] else "g"
    x, y = int(str(head["head"])) * TILE, row * TILE
    return f'<rect class="{kind}" x="{x + 1}" y="{y + 1}" width="{TILE - 2}" height="{TILE - 2}"/>'


def _shown(value: float | None) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.4g}" if math.isfinite(value) else str(value)
