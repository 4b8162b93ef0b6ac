"""A page with a table of runs that can be sorted and filtered: one file without server or network."""

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from mhaprune.lab.reporting.head_map import thumbnail
from mhaprune.lab.reporting.page import as_text, fill
from mhaprune.lab.runs.run_reader import FoundRun
from mhaprune.storage.store import inside


class Column(NamedTuple):
    """A column of the table of runs, with the texts of its cells."""

    name: str
    cells: list[str]
    kind: str = ""
    """The CSS class of the cells: `n` for numbers."""

    @property
    def varies(self) -> bool:
        """True if runs differ in this column. The empty cell of a failed run does not count as a difference."""
        return len(set(self.cells) - ({""} if self.kind else set())) > 1


def index_of(title: str, runs: Sequence[FoundRun], differ: Sequence[str], facts: Mapping[str, str], out: Path) -> str:
    """Return the page: a table that shows, for each run, its state, varying settings, headline numbers, map of heads,
    and a link to its report.

    `facts` has the commands that repeat the runs. Columns in which all runs agree come last.
    """
    settings = [{name: str(value) for name, value in {**run.settings, **run.trained_with}.items()} for run in runs]
    values: dict[str, set[str]] = {}
    for name, value in (pair for of_run in settings for pair in of_run.items()):
        values.setdefault(name, set()).add(value)
    shared = {name: min(only) for name, only in values.items() if len(only) == 1 and name not in differ}
    differing = dict.fromkeys([*differ, *(name for run in runs for name in run.trained_with if name not in shared)])
    numbers = [
        {each.name: each.value for each in run.headline} | {"seconds": run.status.get("seconds")} for run in runs
    ]
    measured = dict.fromkeys(itertools.chain(*numbers))
    done = ["done, poor model" if run.poor else "done" for run in runs]
    states = [(run.why_not or well).partition(":")[0] for run, well in zip(runs, done, strict=True)]
    paths = [run.folder / "report.html" if inside(run.folder, "report.html") is not None else None for run in runs]
    reports = [os.path.relpath(path, out) if path is not None and path.is_file() else None for path in paths]
    columns = [
        Column("state", states),
        *(Column(name, [of_run.get(name, "") for of_run in settings]) for name in differing),
        *(Column(name, [as_text(each.get(name)) for each in numbers], "n") for name in measured),
    ]
    return fill(
        "index",
        url=partial(quote, errors="surrogateescape"),
        thumbnail=thumbnail,
        title=title,
        rows=list(zip(runs, states, reports, strict=True)),
        states=Counter(states),
        first=[column for column in columns if column.varies],
        last=[column for column in columns if not column.varies],
        maps=any(run.small_map is not None for run in runs),
        shared=shared,
        facts=facts,
    )
