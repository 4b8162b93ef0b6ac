"""A sweep is a folder with a list of jobs: started again it does what is left; what goes wrong stays where it is."""

import html
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from collect import main as collect_main
from mhaprune.lab.cli.command_line import main
from mhaprune.lab.runs.collecting import collect
from mhaprune.lab.runs.jobs import LOCK, Job, Sweep, watch
from mhaprune.lab.runs.launching import JobsFailed
from mhaprune.lab.runs.sweep_settings import SweepSettings
from mhaprune.storage.locks import is_held, locked
from support.commands import run_here
from support.made_sweeps import Bench


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("mhaprune.lab.runs.processes.GRACE", 0.4)
    monkeypatch.setattr("mhaprune.lab.runs.launching.GRACE", 2.0)
    return Bench(tmp_path)


def fail() -> None:
    raise ZeroDivisionError("bad\nluck")


def test_started_again_it_does_what_is_left(sweep: Bench, capsys: Any) -> None:
    """In any order of the settings, and with more jobs than before or fewer."""
    sweep.wrong["seed=1"] = fail
    with pytest.raises(JobsFailed, match=r"^1 of 3 jobs not done: seed=1 \(failed: ZeroDivisionError: bad"):
        sweep("seed=0,1,2")
    assert sweep.done() == ["seed=0", "seed=1", "seed=2"]
    times = (sweep.job("seed_0") / "status.json").read_bytes()
    sweep.wrong.clear()
    sweep("seed=3,2,1,0")
    assert sweep.done() == ["seed=3", "seed=1"]
    assert "2 of 4 jobs are done and skipped: seed=2; seed=0\n" in capsys.readouterr().out
    assert (sweep.job("seed_0") / "status.json").read_bytes() == times
    runs = pd.read_csv(sweep.root / "runs.csv")
    assert list(runs["label"]) == ["seed=3", "seed=2", "seed=1", "seed=0"]
    assert list(runs["start"]) == [2, 1, 2, 1], "the jobs of one start were timed beside each other"
    sweep("seed=0,3")
    assert sweep.done() == []
    assert list(pd.read_csv(sweep.root / "runs.csv")["label"]) == ["seed=0", "seed=3"], "the report covers the list"
    page = (sweep.root / "report.html").read_text()
    assert "<title>ablate on sort, 2 seeds</title>" in page
    assert Sweep.read(sweep.root).command in html.unescape(page)  # type: ignore[union-attr]


def test_what_has_changed_is_refused_or_done_again(sweep: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep("seed=0,1", "x=1")
    sweep.done()
    refused = (
        r"^sweep=mine: 2 of its jobs were done with other settings or other code \(seed=0; seed=1\);"
        " on_change=redo does them again, another name keeps them$"
    )
    with pytest.raises(ValueError, match=refused):
        sweep("seed=0,1", "x=2")
    sweep("seed=0,1", "x=1", "cache=/tmp", retries=2)
    assert sweep.done() == [], "what decides no result may change"
    sweep("seed=0,1", "x=2", on_change="redo")
    assert sweep.done() == ["seed=0", "seed=1"]
    sweep("seed=0,1", "x=2")
    assert sweep.done() == []
    monkeypatch.setattr("mhaprune.lab.runs.launching.code_of", lambda modules: {"modules": modules, "digest": "other"})
    with pytest.raises(ValueError, match=refused):
        sweep("seed=0,1", "x=2")


def test_a_damaged_job_is_done_again(sweep: Bench) -> None:
    sweep("seed=0,1,2")
    (sweep.job("seed_0") / "pruning.csv").write_text("gone")
    (sweep.job("seed_1") / "status.json").write_text("{")
    sweep.done()
    sweep("seed=0,1,2")
    assert sweep.done() == ["seed=0", "seed=1"]


def test_a_folder_that_holds_something_else_is_refused(sweep: Bench) -> None:
    sweep.root.mkdir()
    (sweep.root / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="^sweep=mine: its folder is not empty and holds no sweep, name another$"):
        sweep("seed=0,1")
    assert [path.name for path in sweep.root.iterdir()] == ["thesis.txt"]
    (sweep.root / "thesis.txt").unlink()
    sweep("seed=0,1")
    with pytest.raises(ValueError, match="holds another sweep, over seed; this one is over size, name another$"):
        sweep("size=2,4", "seed=0")
    (sweep.root / "sweep.json").write_text('{"jobs": 3}')
    with pytest.raises(ValueError, match="sweep.json: damaged, it must list the jobs of a sweep"):
        sweep("seed=0,1")


def test_a_sweep_that_runs_already_is_refused(sweep: Bench) -> None:
    sweep("seed=0,1")
    busy = f"^sweep=mine: in use by process {os.getpid()} on .*, which does this sweep$"
    with locked(sweep.root / ".sweep.lock"), pytest.raises(ValueError, match=busy):
        sweep("seed=0,1")


def test_a_job_that_is_killed_or_takes_too_long_says_so_and_the_others_go_on(sweep: Bench, capsys: Any) -> None:
    def deaf() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(60)

    sweep.wrong = {
        "seed=0": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "seed=1": lambda: time.sleep(60),
        "seed=2": deaf,
        "seed=3": lambda: [0] * 10**15,
        "seed=4": lambda: os._exit(3),
    }
    with pytest.raises(JobsFailed, match="^5 of 6 jobs not done: "):
        sweep("seed=0,1,2,3,4,5", time_limit=0.3)
    assert sweep.states == [
        "failed: killed by SIGKILL, as the system does when memory runs out",
        "failed: TimeLimit: time_limit=0.3: stopped after 0.3 s; the same command goes on from there",
        "failed: time_limit=0.3: did not stop by itself and was killed",
        "failed: MemoryError:",
        "died: its process is gone, killed or without power",
        "done",
    ]
    said = capsys.readouterr().out
    assert said.index("seed=5: 9 of 24 heads can go") < said.index("seed=0 is not in here, failed: killed"), "last"


def test_a_failed_job_is_tried_again_as_often_as_wanted(sweep: Bench) -> None:
    def fail_twice() -> None:
        with (sweep.folder / "count").open("a+") as count:
            count.write("x")
        if len((sweep.folder / "count").read_text()) <= 2:
            fail()

    sweep.wrong["seed=1"] = fail_twice
    with pytest.raises(JobsFailed):
        sweep("seed=0,1", retries=1)
    assert sweep.done() == ["seed=0", "seed=1", "seed=1"]
    sweep("seed=0,1", retries=1)
    assert sweep.done() == ["seed=1"]


def test_jobs_after_a_failed_one_are_not_started_where_that_is_wanted(sweep: Bench) -> None:
    sweep.wrong["seed=1"] = fail
    with pytest.raises(JobsFailed, match=r"; seed=2 \(not started\); seed=3 \(not started\)$"):
        sweep("seed=0,1,2,3", on_failure="stop")
    assert sweep.done() == ["seed=0", "seed=1"]
    assert sweep.states == ["done", "failed: ZeroDivisionError: bad luck", "not started", "not started"]
    sweep.wrong.clear()
    sweep("seed=0,1,2,3", on_failure="stop")
    assert sweep.done() == ["seed=1", "seed=2", "seed=3"]


def test_a_job_that_a_queue_holds_twice_is_done_once(sweep: Bench) -> None:
    start = sweep.start

    def twice(jobs: Sequence[Job], starts: int) -> None:
        start(jobs, starts)
        start(jobs, starts)

    sweep.start = twice  # type: ignore[method-assign]
    sweep("seed=0,1")
    assert sweep.done() == ["seed=0", "seed=1"]
    sweep("seed=0,1", "x=2", on_change="redo")
    assert sweep.done() == ["seed=0", "seed=1"]


@pytest.mark.parametrize(("holds", "starts"), [(True, 0), (False, 1)])
def test_a_job_whose_sweep_is_gone_ends_its_process(sweep: Bench, holds: bool, starts: int) -> None:
    """It may have waited in a queue, or in a worker, since an earlier start of the sweep, or nobody does that now."""
    sweep("seed=0,1")
    (sweep.job("seed_0") / "status.json").unlink()
    sweep.done()
    waits = multiprocessing.get_context("fork").Process(target=begin_and_wait, args=(sweep, starts))
    with locked(sweep.root / ".sweep.lock") if holds else nullcontext():
        waits.start()
        waits.join(20)
    assert waits.exitcode == 0
    assert sweep.done() == []


def begin_and_wait(sweep: Bench, starts: int) -> None:
    sweep.start(sweep.jobs[:1], starts)
    time.sleep(60)


def test_a_job_that_is_done_elsewhere_is_waited_for(sweep: Bench) -> None:
    """Its sweep was killed, and has not told it yet."""
    sweep("seed=0")
    sweep.done()
    lock, begun = sweep.job("job") / ".lock", time.monotonic()
    other = multiprocessing.get_context("fork").Process(target=hold, args=(lock, 0.5))
    other.start()
    while not is_held(lock):
        time.sleep(0.01)
    sweep("seed=0", "x=2", on_change="redo")
    assert time.monotonic() - begun > 0.4
    assert sweep.done() == ["the only job"]
    other.join()


def hold(lock: Path, seconds: float) -> None:
    with locked(lock):
        time.sleep(seconds)


def test_a_job_ends_soon_after_its_sweep(sweep: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run on another machine, where no signal of this one comes. It saves first."""
    monkeypatch.setattr("mhaprune.lab.runs.processes.PAUSE", 0.05)

    def another_owner() -> None:
        try:  # the signal may come as soon as the lock is written
            (sweep.root / ".sweep.lock").write_text("process 1 on another machine")
            time.sleep(30)
        except KeyboardInterrupt:
            (sweep.folder / "saved").touch()
            raise

    sweep.wrong["seed=0"] = another_owner
    with pytest.raises(JobsFailed, match="seed=0 .failed: interrupted"):
        sweep("seed=0,1")
    assert (sweep.folder / "saved").exists()


def test_jobs_that_a_launcher_lost_are_started_again(sweep: Bench, caplog: Any) -> None:
    """As joblib loses those that wait when a worker is killed."""
    sweep.at_once = 2
    sweep("seed=0,1,2,3,4")
    assert sweep.done() == [f"seed={i}" for i in range(5)]
    assert "jobs were lost: RuntimeError: a worker was killed" in caplog.text
    sweep.at_once = 0
    with pytest.raises(JobsFailed, match="1 of 6 jobs not done: seed=5 .not started."):
        sweep("seed=0,1,2,3,4,5")


@pytest.mark.usefixtures("as_in_a_terminal")
def test_a_signal_reaches_the_running_job_and_the_same_command_goes_on(sweep: Bench) -> None:
    def interrupted() -> None:
        try:
            os.kill(os.getppid(), signal.SIGINT)  # others would end the tests; test_faults.py has them
            time.sleep(30)
        except KeyboardInterrupt:
            time.sleep(0.2)  # as long as it takes to save
            (sweep.folder / "saved").touch()
            raise

    sweep.wrong["seed=1"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        sweep("seed=0,1,2")
    assert (sweep.folder / "saved").exists()
    assert sweep.states == ["done", "interrupted", "not started"]
    sweep.wrong.clear()
    sweep.done()
    sweep("seed=0,1,2")
    assert sweep.done() == ["seed=1", "seed=2"]


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "x" * 101, "a\nb"])
def test_a_name_that_leaves_the_results_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="sweep=.*must be the name of a folder in results/sweeps"):
        SweepSettings(sweep=name)


def test_folders_are_named_by_what_varies_in_any_order(tmp_path: Path) -> None:
    def names(*settings: list[str]) -> list[str]:
        return [job.name for job in Sweep.begin(tmp_path, "sweep=x", settings, [])[0].jobs]

    one, other = names(["a=1", "model.num_heads=2", "seed=0"], ["a=1", "model.num_heads=4", "seed=1"])
    assert re.fullmatch("model.num_heads_2-seed_0-[0-9a-f]{12}", one)
    assert names(["seed=1", "model.num_heads=4", "a=1"], ["seed=0", "a=1", "model.num_heads=2"]) == [other, one]
    long = names([f"x={'ä' * 10_000}1"], [f"x={'ä' * 10_000}2"], ["x='../../a b/${c}'"])
    assert len(set(long)) == 3
    assert all(re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII) for name in long)
    assert len(names(["seed=0"], ["seed=0"])) == 1, "the same job is done once"


def test_a_damaged_job_list_hides_no_job_and_one_that_leads_elsewhere_is_not_followed(sweep: Bench) -> None:
    sweep("seed=0,1")
    path = sweep.root / "sweep.json"
    path.write_text(path.read_text().replace(sweep.job("seed_0").name, "../../elsewhere"))
    lines = collect([sweep.root], sweep.folder / "out")
    assert "is not in here, damaged: its folder leads out of the sweep" in lines[-1]
    path.write_text("{")
    *said, damaged = collect([sweep.root], sweep.folder / "out")
    assert len([line for line in said if "9 of 24 heads can go" in line]) == 2
    assert "sweep.json: damaged, it must list the jobs of a sweep, so its jobs are told by their folders" in damaged


def test_a_running_sweep_is_followed_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    sweep, _ = Sweep.begin(folder, "sweep=x", [[f"seed={i}"] for i in range(4)], [])
    sweep.write(folder)
    names = [job.name for job in sweep.jobs]

    def say(name: str, **status: Any) -> None:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "status.json").write_text(json.dumps({"start": 1, **status}))

    def step(seconds: float) -> None:
        next(steps)

    def happening() -> Any:
        with locked(folder / LOCK), locked(running):
            say(names[1], status="running")
            yield
            yield  # nothing new
            say(names[0], status="done", seconds=100)
            yield
            say(names[2], status="failed", reason="no")
            say(names[3], status="failed", reason="of an earlier start", start=0)
            yield
        say(names[1], status="done", seconds=100)
        yield

    (folder / names[1]).mkdir()
    running, steps = folder / names[1] / ".lock", happening()
    next(steps)
    assert list(watch(folder, pause=step)) == [
        "4 jobs: 0 done, 1 running, 0 failed, 3 to go",
        "4 jobs: 1 done, 1 running, 0 failed, 2 to go, about 4 min left",
        "4 jobs: 1 done, 1 running, 1 failed, 1 to go, about 2 min left",
        "4 jobs: 2 done, 0 running, 1 failed, 1 to go",
    ]


def test_what_is_no_sweep_is_not_followed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no sweep, --watch follows one"):
        list(watch(tmp_path))
    done = run_here(collect_main, str(tmp_path), "--watch", "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr == f"error: folder={tmp_path}: holds no sweep, --watch follows one that was started with -m\n"


SEEDS = ("-m", "experiment=train", "training.steps=1", "task.train=50", "model.max_length=3", "seed=0,1")
"""Jobs that fail at once."""


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("mhaprune.lab.runs.from_hydra.results_folder", lambda: tmp_path)
    return tmp_path / "sweeps"


def test_a_sweep_of_the_command_line_has_a_name(results: Path) -> None:
    """Which may have blanks, quotes and other signs."""
    done = run_here(main, *SEEDS, r"sweep='it\'s a=b, Köpfe'")
    assert done.returncode == 1
    assert done.stderr.startswith("error: 2 of 2 jobs not done: seed=0 (failed: ValueError: model.max_length=3: task")
    assert sorted(path.name[:6] for path in (results / "it's a=b, Köpfe").glob("seed*")) == ["seed_0", "seed_1"]
