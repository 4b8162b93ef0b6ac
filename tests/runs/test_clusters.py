"""The same sweep on SLURM and on ray: the same tables, and jobs that a cluster stops or loses."""

import os
import signal
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from mhaprune.lab.runs.run_folder import LOCK
from support.real_sweeps import RAY, SLURM, check_same, endless, holder, running, saved, start, statuses, tables, until


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    """The tables of the sweep in one process after the other."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(folder, "basic").wait(timeout=280) == 0, (folder / "log").read_text()
    return tables(folder)


@pytest.mark.parametrize("launch", [SLURM, RAY])
def test_the_tables_are_the_same_everywhere(launch: str, tmp_path: Path, undisturbed: dict[str, pd.DataFrame]) -> None:
    assert start(tmp_path, launch).wait(timeout=580) == 0, (tmp_path / "log").read_text()[-3000:]
    check_same(tables(tmp_path), undisturbed)
    before = statuses(tmp_path)
    assert start(tmp_path, launch).wait(timeout=280) == 0
    assert statuses(tmp_path) == before, "what is done is skipped"


def queue(*states: str) -> list[str]:
    """The jobs of SLURM in these states."""
    lines = subprocess.run(["squeue", "-h", "-r", "-o", "%i %T"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in lines.splitlines() if line.split()[1] in states]


def long_jobs(folder: Path) -> subprocess.Popen[str]:
    """Two jobs on SLURM that train for half a minute or so."""
    steps = ["training.steps=4000", "training.evaluate_every=1000", "training.checkpoint_every=500"]
    with (folder / "log").open("a") as log:
        long = endless(folder, "slurm", *steps)
        return subprocess.Popen(long, stdout=log, stderr=log, text=True, start_new_session=True)


@pytest.mark.parametrize("launch", [SLURM])
def test_a_job_whose_time_is_over_is_queued_again_and_goes_on(launch: str, tmp_path: Path) -> None:
    """As SLURM does it: a signal to all processes of the job, some time before the end."""
    sweep = long_jobs(tmp_path)
    until(lambda: len(saved(tmp_path)) == 2)
    [first, *_] = queue("RUNNING")
    subprocess.run(["scancel", "--signal=USR2", first], check=True)
    assert sweep.wait(timeout=280) == 0, (tmp_path / "log").read_text()[-3000:]
    assert set(pd.read_csv(tmp_path / "sweep" / "runs.csv")["state"]) == {"done"}
    logs = [path.read_text() for path in tmp_path.glob("sweep/.submitit/*/*.out")]
    [its_log] = [log for log in logs if "Requeued job" in log]
    assert "trained: goes on from the interrupted one" in its_log


@pytest.mark.parametrize("launch", [SLURM])
def test_a_job_that_the_cluster_lost_is_named(launch: str, tmp_path: Path) -> None:
    sweep = long_jobs(tmp_path)
    until(lambda: len(running(tmp_path)) == 2)
    os.kill(holder(running(tmp_path)[0] / LOCK), signal.SIGKILL)
    assert sweep.wait(timeout=280) == 1
    assert "error: " in (tmp_path / "log").read_text()
    states = sorted(pd.read_csv(tmp_path / "sweep" / "runs.csv")["state"])
    assert states[0] == "died: its process is gone, killed or without power"
