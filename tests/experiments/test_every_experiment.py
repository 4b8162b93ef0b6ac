"""What must hold for every experiment of conf/experiment, a new one too: each is run once, tiny, with its figures."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest

from conftest import TINY, compose, drawing
from mhaprune.config import build
from mhaprune.experiments.base import Experiment
from mhaprune.reporting.head_map import heads_that_matter
from mhaprune.reporting.plots import draw
from mhaprune.store import RunFolder, read_status
from mhaprune.tables import Tables
from tiny import chosen, options, small


class Done(NamedTuple):
    folder: Path
    kind: type[Experiment]
    lines: list[str]

    @property
    def tables(self) -> Tables:
        """As they are read back."""
        return {path.stem: pd.read_csv(path) for path in self.folder.glob("*.csv")}


@pytest.fixture(scope="module", params=options("experiment"))
def done(request: pytest.FixtureRequest, cache: Path) -> Iterator[Done]:
    overrides = [*TINY, *small("task", "sort"), *chosen("experiment", request.param), f"cache={cache}"]
    run = build(compose(*overrides))
    path = cache.parent / request.param
    with drawing(), RunFolder(path).recorded() as folder:
        folder.note(kind="run")
        lines = run(folder).sentences
    yield Done(path, type(run.experiment), lines)
    shutil.rmtree(path)


def test_it_ends_in_sentences_that_the_tables_alone_give(done: Done) -> None:
    assert done.lines
    assert all(line.strip() == line and line and "\n" not in line and "nan" not in line.split() for line in done.lines)
    assert list(done.kind.say(done.tables)) == done.lines
    status = read_status(done.folder)
    assert (status["status"], status["findings"]) == ("done", done.lines)
    for name in status["files"]:
        assert (done.folder / name).stat().st_size > 0


def test_every_figure_is_drawn_in_both_forms_under_a_name_of_its_own(done: Done) -> None:
    tables = done.tables
    verdict = done.kind.head_map(tables)
    plots = [] if verdict is None else [heads_that_matter(verdict)]
    for figure in done.kind.figures:
        drawn = list(draw((figure,), tables))
        assert drawn, f"{figure.__name__} finds nothing to draw"
        plots += drawn
    names = [plot.name for plot in plots]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names)
    assert all(plot.caption for plot in plots)
    files = {path.name for path in (done.folder / "figures").glob("*")}
    assert files == {f"{name}.{form}" for name in names for form in ("png", "svg")}
    page = (done.folder / "report.html").read_text()
    assert page.count("<img ") == page.count(' alt="') == len(plots)


def test_two_runs_are_compared(done: Done) -> None:
    """In a sentence for each, at least, and by every figure that it has for that."""
    own = [
        {name: frame.assign(label=label, setting="") for name, frame in done.tables.items()}
        for label in ("one", "other")
    ]
    both = {name: pd.concat([tables[name] for tables in own], ignore_index=True) for name in done.tables}
    assert len(list(done.kind.say_over_runs(both))) >= 2
    drawn = [[plot.name for plot in draw((figure,), both)] for figure in done.kind.figures_over_runs]
    assert all(drawn)
    names = [name for mine in drawn for name in mine]
    assert len(set(names)) == len(names)


def test_every_row_says_of_which_run_it_is(done: Done) -> None:
    for name, frame in done.tables.items():
        if len(frame):
            assert list(frame["run"].unique()) == [read_status(done.folder)["identity"]["run"]], name
