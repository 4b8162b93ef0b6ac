"""Tables as runs of `experiment=learn` write them and `collect` combines them, made by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from mhaprune.experiments.learn.study import time_to
from mhaprune.tables import Tables

EVERY, STEPS = 10, 100


def history(*exact: float, every: int = EVERY, ms_per_step: float = 20) -> pd.DataFrame:
    """What training leaves of these evaluations, the first one before training."""
    steps = [every * i for i in range(len(exact))]
    table = pd.DataFrame({"step": steps, "seconds": [step * ms_per_step / 1000 for step in steps]})
    return table.assign(loss=1.0, valid_loss=1.0, valid_token_accuracy=exact, valid_quality=exact)


def tables(learning: pd.DataFrame, target: float = 0.99) -> dict[str, pd.DataFrame]:
    """Those of one run."""
    last = {f"{name}{end}": 0.9 for name in ("token_accuracy", "quality") for end in ("", "_low", "_high")}
    reached = pd.DataFrame([time_to(learning, target) | {"parameters": 212000} | last])
    return {"training": learning, "reached": reached}


def run(at: int | None, target: float = 0.99, ms_per_step: float = 20, steps: int = STEPS) -> dict[str, pd.DataFrame]:
    """A run that reaches its target at a step, or never."""
    exact = [0.93 * i * EVERY / steps if at is None else min(0.999, i * EVERY / at) for i in range(steps // EVERY + 1)]
    return tables(history(*exact, ms_per_step=ms_per_step), target)


def collected(runs: Iterable[tuple[str, str, int, dict[str, pd.DataFrame]]]) -> Tables:
    """The tables of runs with their task, setting and seed."""
    parts: dict[str, list[pd.DataFrame]] = {"training": [], "reached": []}
    for task, setting, seed, own in runs:
        label = ", ".join(filter(None, [setting, f"seed={seed}"]))
        for name, frame in own.items():
            parts[name].append(frame.assign(label=label, setting=setting, task=task, seed=seed))
    return {name: pd.concat(frames, ignore_index=True) for name, frames in parts.items()}


def sweep(**steps: list[int | None]) -> Tables:
    """One task, for every value of the setting `rate` the steps that its runs take with seed 0, 1 and so on."""
    return collected(
        ("sort", f"rate={name}", seed, run(at)) for name, own in steps.items() for seed, at in enumerate(own)
    )
