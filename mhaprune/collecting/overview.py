"""All runs at a glance: as a table, and as a page to sort and to filter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from mhaprune.collecting.parts import Part
from mhaprune.collecting.run_names import Names
from mhaprune.reporting.index import Row, render_index
from mhaprune.storage.store import inside
from mhaprune.tables import LABEL


def table_of(parts: Sequence[Part]) -> pd.DataFrame:
    """A row per run: what it is called, where it is, how it ended. Runs of one `start` were timed side by side."""
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


def index_of(title: str, parts: Sequence[Part], called: Names, out: Path) -> str:
    """The page: each run's state, the settings that vary, its first numbers, its map of heads, a link to its report."""
    rows = []
    for part, settings in zip(parts, called.details, strict=True):
        report = part.run.folder / "report.html"
        there = inside(part.run.folder, report.name) is not None and report.is_file()
        rows.append(
            Row(
                label=part.label,
                state=(part.why_not or "done").partition(":")[0],
                link=os.path.relpath(report, out) if there else None,
                settings={name: settings.get(name, "") for name in called.varying},
                numbers={**part.headline, "seconds": part.run.status.get("seconds")},
                verdict=part.verdict,
                said=part.sentence or part.why_not or "",
            )
        )
    return render_index(title, rows)
