"""One small sweep of six real jobs as the command line does it, and what can be seen of it from outside."""

import importlib.util
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mhaprune.lab.runs.run_folder import read_status
from mhaprune.storage.seals import opened
from support import ROOT
from support.sizes import TINY, TINY_ABLATE, TINY_SEQUENCES, once

MEASURED = {"seconds", "latency_ms", "speedup", "speedup_q1", "speedup_q3"}
"""The columns that a clock has measured."""
SETTINGS = once(
    *(*TINY, *TINY_SEQUENCES, *TINY_ABLATE, "training.steps=60", "training.checkpoint_every=20", "scorer=[ablation]"),
    *("recovery=[]", "experiment.budgets=[0.5]", "model.num_heads=1,2", "seed=0,1,2"),
)


def _slurm_answers() -> bool:
    return shutil.which("sinfo") is not None and subprocess.run(["sinfo"], capture_output=True).returncode == 0


def _missing(*modules: str) -> str | None:
    lacking = [module for module in modules if importlib.util.find_spec(module) is None]
    return f"{', '.join(lacking)} is not installed" if lacking else None


def _launch(name: str, why_not: str | None) -> Any:
    skip = pytest.mark.skipif(why_not is not None, reason=why_not or "")
    return pytest.param(name, marks=[getattr(pytest.mark, name), skip])


NO_SLURM = None if _slurm_answers() else "no SLURM answers here, scripts/local_slurm.sh starts one"
SLURM = _launch("slurm", _missing("submitit", "hydra_plugins.hydra_submitit_launcher") or NO_SLURM)
RAY = _launch("ray", _missing("ray", "hydra_plugins.hydra_ray_launcher"))


def command(folder: Path, launch: str) -> list[str]:
    place = [f"hydra.sweep.dir={folder / 'sweep'}", f"cache={folder / 'cache'}", f"launch={launch}"]
    return [sys.executable, str(ROOT / "scripts" / "run.py"), "-m", "experiment=ablate", *SETTINGS, *place]


def start(folder: Path, launch: str) -> subprocess.Popen[str]:
    with (folder / "log").open("a") as log:
        return subprocess.Popen(command(folder, launch), stdout=log, stderr=log, text=True, start_new_session=True)


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Without what a clock has measured, and without the table of folders and seconds."""
    found = {path.stem: pd.read_csv(path) for path in sorted((folder / "sweep").glob("*.csv")) if path.stem != "runs"}
    found["means"] = found["means"][~found["means"]["number"].str.startswith("times as fast")]
    return {name: frame[[column for column in frame if column not in MEASURED]] for name, frame in found.items()}


def check_same(found: Mapping[str, pd.DataFrame], expected: Mapping[str, pd.DataFrame]) -> None:
    """To the last bit."""
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        pd.testing.assert_frame_equal(found[name], table, check_exact=True)


def statuses(folder: Path) -> dict[str, bytes]:
    """The statuses of the jobs of the sweep, with the times when they began."""
    return {path.parent.name: path.read_bytes() for path in folder.glob("sweep/*/status.json")}


def whole(folder: Path) -> None:
    """No file of a job is half written, at any moment."""
    assert all(read_status(path.parent) for path in folder.rglob("status.json"))
    assert not list(folder.rglob("*.damaged"))


def running(folder: Path) -> list[Path]:
    """The jobs of the sweep that run now."""
    jobs = [path.parent for path in folder.glob("sweep/*/status.json")]
    return [job for job in jobs if read_status(job).get("status") == "running"]


def holder(lock: Path) -> int:
    """The process that has a lock."""
    return int(lock.read_text().split()[1])


def until(seen: Callable[[], object], seconds: float = 240, pause: float = 0.05) -> None:
    """Wait until something is seen, which must be in time."""
    deadline = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(pause)


def saved(folder: Path) -> list[dict[str, Any]]:
    """The states of interrupted trainings in the cache."""
    return [opened(path.read_bytes())["content"] for path in folder.glob("cache/trained-*.partial.pt")]


def endless(folder: Path, launch: str, *steps: str) -> list[str]:
    """The command of two jobs that train for long."""
    swept = ("training.", "seed=", "model.num_heads")
    return [*(one for one in command(folder, launch) if not one.startswith(swept)), *steps, "seed=0,1"]


def hear() -> None:
    """Take interrupts as in a terminal: a shell makes what runs in its background ignore them, its children too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
