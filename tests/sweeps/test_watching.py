from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from collect import main as collect_main
from conftest import run_here
from mhaprune.storage.locks import locked
from mhaprune.sweeps.jobs import LOCK, Sweep, watch


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
