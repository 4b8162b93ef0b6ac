"""Real processes that are killed at random moments, and the same command again: as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from conftest import ROOT, TINY, TINY_ABLATE, TINY_SEQUENCES
from mhaprune.storage.seals import opened
from mhaprune.storage.store import read_status
from mhaprune.storage.sweeps import Sweep

pytestmark = pytest.mark.faults

MEASURED = {"seconds", "latency_ms", "speedup", "speedup_q1", "speedup_q3"}
"""The columns that a clock has measured."""
SETTINGS = (
    *TINY,
    *TINY_SEQUENCES,
    *TINY_ABLATE,
    "training.steps=60",
    "training.checkpoint_every=20",
    "scorer=[ablation]",
    "recovery=[]",
    "experiment.budgets=[0.5]",
    "model.num_heads=1,2",
    "seed=0,1,2",
)


def command(folder: Path, launch: str) -> list[str]:
    place = [f"hydra.sweep.dir={folder / 'sweep'}", f"cache={folder / 'cache'}", f"launch={launch}"]
    return [sys.executable, str(ROOT / "scripts" / "run.py"), "-m", "experiment=ablate", *SETTINGS, *place]


def start(folder: Path, launch: str) -> subprocess.Popen[str]:
    with (folder / "log").open("a") as log:
        return subprocess.Popen(command(folder, launch), stdout=log, stderr=log, text=True, start_new_session=True)


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Without what a clock has measured, and without the table of folders and seconds."""
    found = {path.stem: pd.read_csv(path) for path in sorted((folder / "sweep").glob("*.csv")) if path.stem != "runs"}
    return {name: frame[[column for column in frame if column not in MEASURED]] for name, frame in found.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, pd.DataFrame], float]:
    """The tables of a sweep that nothing happened to, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("undisturbed")
    began = time.monotonic()
    assert start(folder, "basic").wait(timeout=280) == 0, (folder / "log").read_text()
    return tables(folder), time.monotonic() - began


def whole(folder: Path) -> None:
    """No file of a job is half written, at any moment."""
    for path in folder.rglob("status.json"):
        assert read_status(path.parent), path
    for path in folder.rglob("*.damaged"):
        raise AssertionError(path)


@pytest.mark.parametrize(("launch", "kills"), [("basic", 10), ("joblib", 10)])
def test_killed_at_random_moments_it_ends_in_the_same_tables(
    launch: str, kills: int, tmp_path: Path, undisturbed: tuple[dict[str, pd.DataFrame], float]
) -> None:
    expected, seconds = undisturbed
    draw, left = random.Random(launch), kills
    while left:
        process = start(tmp_path, launch)
        try:
            process.wait(timeout=draw.uniform(2, seconds))
            break  # done before it could be killed again
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            left -= 1
            time.sleep(draw.choice([0.2, 0.5]))
            assert not running(tmp_path), "a job outlives its sweep"
            whole(tmp_path)
    assert start(tmp_path, launch).wait(timeout=280) == 0, (tmp_path / "log").read_text()[-3000:]
    found = tables(tmp_path)
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        pd.testing.assert_frame_equal(found[name], table, check_exact=True)
    assert start(tmp_path, launch).wait(timeout=280) == 0
    assert "6 of 6 jobs are done and skipped" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("launch", ["basic", "joblib"])
def test_a_killed_job_is_one_of_many(launch: str, tmp_path: Path) -> None:
    """The process of one job is killed, not that of the sweep."""
    process, killed = start(tmp_path, launch), False
    deadline = time.monotonic() + 250
    while process.poll() is None and time.monotonic() < deadline:
        for job in running(tmp_path):
            if not killed and "seed_1" in job.name:
                os.kill(int((job / ".lock").read_text().split()[1]), signal.SIGKILL)
                killed = True
        time.sleep(0.01)
    assert killed
    assert process.returncode == 1
    states = list(pd.read_csv(tmp_path / "sweep" / "runs.csv")["state"])
    assert sorted(states) == [*["done"] * 5, "failed: killed by SIGKILL, as the system does when memory runs out"]
    assert start(tmp_path, launch).wait(timeout=280) == 0
    assert set(pd.read_csv(tmp_path / "sweep" / "runs.csv")["state"]) == {"done"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("launch", ["basic", "joblib"])
def test_an_interrupted_sweep_saves_at_once(launch: str, number: signal.Signals, tmp_path: Path) -> None:
    swept = ("training.", "seed=", "model.num_heads")
    endless = [one for one in command(tmp_path, launch) if not one.startswith(swept)]
    endless += ["training.steps=100000", "training.evaluate_every=1000", "training.checkpoint_every=1000", "seed=0,1"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(endless, stdout=log, stderr=log, start_new_session=True, preexec_fn=hear)
    jobs = 1 if launch == "basic" else 2
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "cache").glob("trained-*.partial.pt"))) < jobs and time.monotonic() < deadline:
        time.sleep(0.1)
    found = running(tmp_path)
    time.sleep(0.7)  # they are in the middle between two states that they save anyway
    os.kill(process.pid, number)
    assert process.wait(timeout=60) == 130
    said = (tmp_path / "log").read_text()
    assert "error: interrupted; what was trained is kept, the same command goes on from there" in said
    assert [read_status(job).get("reason") for job in found] == ["interrupted"] * jobs, said
    states = [opened(path.read_bytes())["content"] for path in (tmp_path / "cache").glob("trained-*.partial.pt")]
    assert len(states) == jobs
    assert any(state["step"] % 1000 for state in states), "it was saved at once"


def running(folder: Path) -> list[Path]:
    """The jobs of the sweep that run now."""
    jobs = [path.parent for path in folder.glob("sweep/*/status.json")]
    return [job for job in jobs if read_status(job).get("status") == "running"]


def hear() -> None:
    """Take interrupts as in a terminal: a shell makes what runs in its background ignore them, its children too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_job_list_is_there_before_the_first_job(tmp_path: Path) -> None:
    process = start(tmp_path, "basic")
    deadline = time.monotonic() + 120
    while not (tmp_path / "sweep" / "sweep.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    sweep = Sweep.read(tmp_path / "sweep")
    assert sweep is not None
    assert len(sweep.jobs) == 6
