"""A search proposes jobs by what earlier ones have found, and remembers nothing but the jobs."""

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from mhaprune.front.command_line import main
from mhaprune.runs.from_hydra import to_choose
from mhaprune.runs.jobs import Job, Sweep
from mhaprune.runs.launching import JobsFailed
from mhaprune.runs.searching import OptunaSearch
from mhaprune.settings.sweep import SearchSettings
from support.commands import run_here
from support.made_sweeps import Bench
from support.made_tables import summary

pytest.importorskip("optuna", reason="pip install -e '.[search]'")
pytestmark = pytest.mark.filterwarnings("ignore")

SPACE = ("heads=2,4,8", "rate=tag(log,interval(1e-4,1e-1))", "width=int(interval(16,64))", "seed=0")


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Its jobs are done in this process, which is quicker; test_sweeps.py does them in processes of their own."""

    def here(work: Callable[[], None], *limits: object) -> None:
        with suppress(Exception):
            work()

    monkeypatch.setattr("mhaprune.runs.doing.isolated", here)
    bench = Bench(tmp_path)
    bench.tables = lambda job: {"training": pd.DataFrame({"quality": [9.0, quality(job)]}), "summary": summary()}
    return bench


def quality(job: Job) -> float:
    """Best, 0, with 4 heads at a rate of 1e-2."""
    given = dict(one.split("=") for one in job.overrides)
    return -abs(int(given["heads"]) - 4) - (np.log10(float(given["rate"])) + 2) ** 2


def search(sweep: Bench, *space: str, **settings: Any) -> OptunaSearch:
    overrides = OverridesParser.create().parse_overrides(list(space or SPACE))
    return OptunaSearch(SearchSettings(**{"column": "training.quality", **settings}), *to_choose(overrides), sweep.root)


def do(sweep: Bench, searching: OptunaSearch) -> list[Job]:
    before = Sweep.read(sweep.root)
    first = searching.more([]) if before is None else searching.again(before)
    sweep.over(first, varying=list(searching.space), more=searching.more)
    return sweep.jobs


def test_it_learns_from_what_was_found(sweep: Bench) -> None:
    found = do(sweep, searching := search(sweep, trials=30))
    assert len(found) == 30
    qualities = [quality(job) for job in found]
    assert np.mean(qualities[-10:]) > np.mean(qualities[:10]) + 0.5
    assert f"best of 30: {found[int(np.argmax(qualities))].label}, with training.quality" in searching.best(found)
    assert {int(dict(one.split("=") for one in job.overrides)["width"]) for job in found} <= set(range(16, 65))
    assert {one for job in found for one in job.overrides if one.startswith("seed")} == {"seed=0"}


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(sweep: Bench, tmp_path: Path) -> None:
    other = Bench(tmp_path / "other")
    other.folder.mkdir()
    other.tables = sweep.tables
    whole = [job.label for job in do(other, search(other, trials=14))]
    assert [job.label for job in do(sweep, search(sweep, trials=12))] == whole[:12]
    assert sweep.done() == whole[:12]
    assert [job.label for job in do(sweep, search(sweep, trials=14))] == whole
    assert sweep.done() == whole[12:], "what is done is not done again"


def test_what_is_typed_for_all_jobs_may_not_change_without_a_word(sweep: Bench) -> None:
    """Neither may what an earlier job was given be left out of the space."""
    do(sweep, search(sweep, "heads=2,4,8", "rate=1e-2", trials=3))
    sweep.done()
    with pytest.raises(ValueError, match="^sweep=mine: 3 of its jobs were done with other settings or other code"):
        do(sweep, search(sweep, "heads=2,4,8", "rate=1e-3", trials=3))
    with pytest.raises(ValueError, match="^heads: an earlier job of this search has [24], which may not be chosen now"):
        do(sweep, search(sweep, "heads=8,16", "rate=1e-2", trials=5))
    with pytest.raises(ValueError, match="^heads: an earlier job of this search has [28], which may not be chosen now"):
        do(sweep, search(sweep, "heads=int(interval(3,4))", "rate=1e-2", trials=5))
    assert sweep.done() == []


def test_a_failed_job_is_known_and_the_search_goes_on(sweep: Bench) -> None:
    [first, *_] = (searching := search(sweep, "heads=2,4,8", "rate=1e-2", trials=5)).more([])
    sweep.wrong[next(one for one in first if one.startswith("heads"))] = lambda: 1 / 0
    with pytest.raises(JobsFailed, match="^1 of 3 jobs not done"):
        do(sweep, searching)
    assert len(sweep.jobs) == 3, "there are no more than three"
    assert "best of 2: " in searching.best(sweep.jobs)
    assert search(sweep, goal="minimize", row="max").best(sweep.jobs).endswith("quality 9")


def test_jobs_that_run_at_once_are_proposed_together(sweep: Bench) -> None:
    searching = search(sweep, trials=10, at_once=4)
    sizes: list[int] = []

    def more(done: Any) -> Any:
        proposed = searching.more(done)
        sizes.append(len(proposed))
        return proposed

    sweep.over(searching.more([]), varying=list(searching.space), more=more)
    assert sizes == [4, 2, 0]
    assert len({job.name for job in sweep.jobs}) == 10


def test_a_column_that_is_none_is_refused(sweep: Bench) -> None:
    sweep.over(search(sweep).more([]))
    for column, said in (
        ("nowhere.x", "there is no table nowhere, allowed are summary, training"),
        ("training.x", "no such column of numbers, allowed are quality"),
    ):
        with pytest.raises(ValueError, match=f"^search.column={column}: {said}"):
            search(sweep, column=column).more(sweep.jobs)
    with pytest.raises(ValueError, match="^search=optuna: needs settings to choose from"):
        search(sweep, "seed=0")


def test_what_cannot_be_searched_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mhaprune.runs.from_hydra.results_folder", lambda: tmp_path)
    settings = ("-m", "experiment=train", "sweep=mine", "search=optuna", "seed=0,1")
    assert "error: search.trials=0: must be from 1 to" in run_here(main, *settings, "search.trials=0").stderr
    assert "needs -m" in run_here(main, "search=optuna").stderr
    interval = run_here(main, "-m", "experiment=train", "training.learning_rate=interval(0.1,0.2)").stderr
    assert interval.startswith("error: training.learning_rate=interval(0.1,0.2): needs search=optuna, which chooses")
    for values in ("interval(2,1)", "tag(log,interval(0,1))"):
        given = f"training.learning_rate={values}"
        said = run_here(main, *settings, given).stderr
        assert said == f"error: {given}: must go from a number to a higher one, and be above 0 with tag(log,...)\n"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_here(main, *settings).stderr == "error: search=optuna: is not installed: pip install -e '.[search]'\n"
    assert not (tmp_path / "sweeps").exists()
