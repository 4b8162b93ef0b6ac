"""Jobs of a sweep side by side."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from benches.sides import Row
from mhaprune.measure.times import in_turn, ratios

RUN = Path(__file__).parents[1] / "run.py"


def sweep(rounds: int = 5) -> list[Row]:
    """Four jobs that train a model of `sort`: how much longer they take one after the other than two at once. A round
    takes minutes, so there are few."""
    command = [sys.executable, str(RUN), "-m", "experiment=train", "seed=0,1,2,3"]

    def jobs(launch: str) -> Callable[[], object]:
        def call() -> None:
            with TemporaryDirectory() as folder:
                places = [f"hydra.sweep.dir={folder}/sweep", f"cache={folder}/cache"]
                subprocess.run([*command, f"launch={launch}", *places], check=True, stdout=subprocess.DEVNULL)

        return call

    calls = {"basic": jobs("basic"), "joblib": jobs("joblib"), "basic again": jobs("basic")}
    times = in_turn(calls, rounds, warmup=0)
    return [
        {"name": "sweep of 4, basic over joblib", **ratios(times, "basic", "joblib")},
        {"name": "sweep of 4, A/A", **ratios(times, "basic again", "basic")},
    ]
