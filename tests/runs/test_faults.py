"""Real processes that are killed, and disks that fill up: the same command again, as if nothing had happened."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

from mhaprune.lab.runs.run_folder import LOCK, read_status
from support import ROOT
from support.real_sweeps import (
    RAY,
    SLURM,
    check_same,
    endless,
    hear,
    holder,
    running,
    saved,
    start,
    statuses,
    tables,
    until,
    whole,
)
from support.sizes import TINY, TINY_ABLATE, TINY_SEQUENCES, once

pytestmark = pytest.mark.faults

KILLS = 20


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, pd.DataFrame], float]:
    """The tables of a sweep that nothing happened to, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("undisturbed")
    began = time.monotonic()
    assert start(folder, "basic").wait(timeout=280) == 0, (folder / "log").read_text()
    return tables(folder), time.monotonic() - began


@pytest.mark.parametrize("launch", ["basic", "joblib", SLURM])
def test_killed_at_random_moments_it_ends_in_the_same_tables(
    launch: str, tmp_path: Path, undisturbed: tuple[dict[str, pd.DataFrame], float]
) -> None:
    """A sweep that is done before it was killed often enough is checked, and another one begun. Every other time all of
    its processes are killed, else only the first one: the workers of a launcher go on, and the next start waits for
    their jobs."""
    expected, seconds = undisturbed
    draw, kills, sweeps = random.Random(launch), 0, 0
    while kills < KILLS:
        folder, left = tmp_path / str(sweeps), list[int]()
        folder.mkdir()
        sweeps += 1
        while kills < KILLS and not killed(process := start(folder, launch), draw.uniform(2, seconds / 2), kills % 2):
            kills += 1
            left.append(process.pid)
            whole(folder)
        assert start(folder, launch).wait(timeout=280) == 0, (folder / "log").read_text()[-3000:]
        check_same(tables(folder), expected)
        before = statuses(folder)
        assert start(folder, launch).wait(timeout=280) == 0
        assert statuses(folder) == before, "what is done is skipped"
        for session in left:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
    print(f"{launch}: killed {kills} times in {sweeps} sweeps")


def killed(process: subprocess.Popen[str], seconds: float, alone: int) -> bool:
    """Kill the sweep after so many seconds, with its workers or alone. Returns whether it was done before."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        (os.kill if alone else os.killpg)(process.pid, signal.SIGKILL)
        process.wait()
        return False
    return True


@pytest.mark.parametrize("launch", ["joblib", SLURM, RAY])
def test_a_killed_job_is_done_when_the_sweep_is_started_again(launch: str, tmp_path: Path) -> None:
    """The process of one job is killed, not that of the sweep."""
    process, killed = start(tmp_path, launch), False
    deadline = time.monotonic() + 250
    while process.poll() is None and time.monotonic() < deadline:
        for job in running(tmp_path):
            if not killed and "seed_1" in job.name:
                os.kill(holder(job / LOCK), signal.SIGKILL)
                killed = True
        time.sleep(0.01)
    assert killed
    assert process.returncode == (0 if launch == "ray" else 1), "ray tries again by itself"
    assert "error: " in (tmp_path / "log").read_text() or launch == "ray"
    assert start(tmp_path, launch).wait(timeout=280) == 0
    assert list(pd.read_csv(tmp_path / "sweep" / "runs.csv")["state"]) == ["done"] * 6


@pytest.mark.parametrize(
    ("launch", "number"),
    [
        *(("basic", number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)),
        *(("joblib", number) for number in (signal.SIGINT, signal.SIGTERM)),
        pytest.param(*SLURM.values, signal.SIGINT, marks=SLURM.marks),
        pytest.param(*RAY.values, signal.SIGINT, marks=RAY.marks),  # which handles SIGTERM itself
    ],
)
def test_an_interrupted_sweep_is_combined_and_goes_on(launch: str, number: signal.Signals, tmp_path: Path) -> None:
    """Without a launcher it saves at once. A launcher may kill its jobs, which save their state at intervals."""
    steps = ["training.steps=100000", "training.evaluate_every=1000", "training.checkpoint_every=1000"]
    with (tmp_path / "log").open("w") as log:
        long = endless(tmp_path, launch, *steps)
        process = subprocess.Popen(long, stdout=log, stderr=log, start_new_session=True, preexec_fn=hear)
    jobs = 1 if launch == "basic" else 2
    until(lambda: len(saved(tmp_path)) == jobs)
    time.sleep(0.7)  # they are in the middle between two states that they save anyway
    os.kill(process.pid, number)
    assert process.wait(timeout=60) == 130
    if launch == "slurm":  # where its jobs go on
        subprocess.run(["scancel", "--name=mhaprune"], check=True)
    said = (tmp_path / "log").read_text()
    assert "error: interrupted; the same command goes on from what was saved" in said
    assert (tmp_path / "sweep" / "runs.csv").exists()
    whole(tmp_path)
    assert len(saved(tmp_path)) == jobs
    if launch == "basic":
        assert list(pd.read_csv(tmp_path / "sweep" / "runs.csv")["state"]) == ["interrupted"]
        assert saved(tmp_path)[0]["step"] % 1000, "it was saved at once"


@pytest.mark.parametrize("kill", [False, True])
def test_eight_processes_that_want_one_model_train_it_once(kill: bool, tmp_path: Path) -> None:
    """Where the one that trains is killed another goes on from what it saved."""
    steps, cache = ["training.steps=400", "training.checkpoint_every=50"], tmp_path / "cache"
    train = [
        sys.executable,
        str(ROOT / "scripts" / "run.py"),
        "experiment=train",
        *once(*TINY, *TINY_SEQUENCES, *steps),
    ]
    logs = [tmp_path / f"log{i}" for i in range(8)]
    processes = []
    for i, path in enumerate(logs):
        with path.open("w") as log:
            places = [f"cache={cache}", f"hydra.run.dir={tmp_path / 'runs' / str(i)}"]
            processes.append(subprocess.Popen([*train, *places], stdout=log, stderr=log))
    if kill:
        until(lambda: list(cache.glob("trained-*.partial.pt")), pause=0.02)
        [lock] = cache.glob("trained-*.lock")
        trains = holder(lock)
        os.kill(trains, signal.SIGKILL)
    codes = [process.wait(timeout=280) for process in processes]
    said = "\n".join(path.read_text() for path in logs)
    assert sorted(codes) == ([-signal.SIGKILL] if kill else [0]) + [0] * 7
    assert said.count("trained: made in") == 1
    assert said.count("trained: goes on from the interrupted one") == kill
    assert said.count("trained: taken from the cache") == (6 if kill else 7)


SMALL = ["scorer=[ablation]", "recovery=[]", "experiment.budgets=[0.5]"]
WIDE = ["model.d_model=128", "model.dim_feedforward=256", *SMALL]
"""A model of some megabytes."""


class Disk:
    """A small one, in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resize(self, kilobytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", self.path], check=True)

    def protect(self) -> None:
        """Make it read-only. The rights of files would not stop root."""
        subprocess.run(["mount", "-o", "remount,ro", self.path], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", place], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a disk here: {mounted.stderr.strip()}")
    yield Disk(place)
    subprocess.run(["umount", "--lazy", place], check=True)


def run(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    settings = [*once(*TINY, *TINY_SEQUENCES, *TINY_ABLATE, *WIDE), f"hydra.run.dir={folder}", f"cache={cache}"]
    command = [sys.executable, str(ROOT / "scripts" / "run.py"), "experiment=ablate", *settings]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def done(folder: Path, cache: Path) -> str:
    """What a run says that is done."""
    found = run(folder, cache)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize("kilobytes", [12, 40, 60, 100, 200])
def test_a_run_folder_on_a_full_disk(disk: Disk, tmp_path: Path, kilobytes: int) -> None:
    disk.resize(kilobytes)
    folder = disk.path / "run"
    full = run(folder, tmp_path / "cache")
    assert full.returncode == 1
    error = full.stderr.splitlines()[-1]
    assert error.startswith(f"error: {folder}/" if kilobytes > 12 else "error: No space left on device; hydra.run.dir")
    assert "No space left on device" in error
    status = read_status(folder)
    assert not status or (status["status"], status["reason"][:8]) == ("failed", "OSError:")
    assert status or kilobytes == 12, "not even room for a status"
    disk.resize(100_000)
    said = done(folder, tmp_path / "cache")
    assert kilobytes == 12 or "trained: taken from the cache" in said
    assert read_status(folder)["status"] == "done"


@pytest.mark.parametrize("kilobytes", [200, 1000, 5000])
def test_a_cache_on_a_full_disk(disk: Disk, tmp_path: Path, kilobytes: int) -> None:
    disk.resize(kilobytes)
    cache = disk.path / "cache"
    not_kept = rf"{cache}/trained-\w+\.pt: not kept \(No space left on device\), so it will be made again"
    small = re.search(not_kept, done(tmp_path / "run", cache))
    assert bool(small) == (kilobytes < 5000)
    assert not list(cache.glob(".*.tmp")), "nothing half-written is left to fill the disk"
    disk.resize(100_000)
    for expected in ("trained: made in" if small else "trained: taken", "trained: taken"):
        assert expected in done(tmp_path / "run", cache)


def test_a_read_only_cache_is_used_where_it_holds_what_is_wanted(disk: Disk, tmp_path: Path) -> None:
    cache = disk.path / "cache"
    done(tmp_path / "run", cache)
    disk.protect()
    assert "trained: taken from the cache" in done(tmp_path / "again", cache)


def test_read_only_folders_are_named_before_anything_is_trained(disk: Disk, tmp_path: Path) -> None:
    disk.protect()
    refused = run(disk.path / "run", tmp_path / "cache")
    assert refused.stderr.splitlines()[-1].startswith(
        f"error: {disk.path / 'run'}: Read-only file system; hydra.run.dir and cache must name"
    )
    refused = run(tmp_path / "run", disk.path / "cache")
    assert refused.stderr.splitlines()[-1].startswith(
        f"error: cache={disk.path / 'cache'}: cannot be written (Read-only file system)"
    )
    assert not (tmp_path / "run").exists()
