"""Times of calls, measured side by side: calls take turns in one process, and a control shows the noise."""

import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TypeVar

import pandas as pd
import torch

from mhaprune.progress import track

COPIES = 4
"""The number of copies of each model that take turns. Of two equal models, one can be 1 % faster because of the place
of its weights in memory."""
COPIES_BYTES = 2**31
"""The largest memory of all copies together, in bytes."""

Device = torch.device | str
Model = TypeVar("Model")


@torch.no_grad()
def in_turn(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    device: Device = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> pd.DataFrame:
    """Return milliseconds of every call (columns) in every round (rows), after `warmup` rounds that do not count.

    A round makes each call once, in a new random order, so that no call always follows the same neighbour. On a machine
    with other work, use `time.process_time` as the `clock`: it counts only the time of this process.
    """
    names, draw = list(calls), random.Random(0)
    rows: list[dict[str, float]] = []
    for turn in track(range(-warmup, rounds), "round"):
        row = {name: milliseconds(calls[name], device, clock) for name in draw.sample(names, len(names))}
        if turn >= 0:
            rows.append(row)
    return pd.DataFrame(rows, columns=names)


def milliseconds(
    call: Callable[[], object], device: Device = "cpu", clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the milliseconds of one call: on a GPU between two CUDA events, otherwise by the clock."""
    if torch.device(device).type != "cuda":
        begin = clock()
        call()
        return 1000 * (clock() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)  # or the first event would wait for earlier calls
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def clock_for(device: Device) -> Callable[[], float]:
    """Return the clock of this process where it computes in one thread, so that other work does not count; else that of
    the wall."""
    alone = torch.device(device).type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def copies_that_fit(size: int, models: int) -> int:
    """Return the number of copies to make of each model, at most `COPIES`. One copy takes `size` bytes. Large models
    get fewer copies, because their place in memory matters less."""
    return max(1, min(COPIES, COPIES_BYTES // max(1, size * models)))


def copies(makers: Mapping[str, Callable[[], Model]], number: int = COPIES) -> dict[str, list[Model]]:
    """Make `number` copies with each maker, in a random order.

    If all copies of one model were neighbours in memory, they could be 2 % slower than the copies of another model.
    """
    made: dict[str, list[Model]] = {name: [] for name in makers}
    draw = random.Random(0)
    for _ in range(number):
        for name in draw.sample(list(makers), len(makers)):
            made[name].append(makers[name]())
    return made


def taking_turns(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return a function that makes the next of these calls each time, in a cycle."""
    turns = cycle(calls)
    return lambda: next(turns)()


def ratios(times: pd.DataFrame, ours: str, peer: str) -> pd.Series:
    """Return the median times of `ours` and `peer`, and the median and quartiles of the ratio `ours` / `peer`. Each
    round gives one ratio, because a slow moment slows both."""
    ratio = times[ours] / times[peer]
    return pd.Series(
        {
            "ours_ms": times[ours].median(),
            "peer_ms": times[peer].median(),
            "ratio": ratio.median(),
            "q1": ratio.quantile(0.25),
            "q3": ratio.quantile(0.75),
        }
    )


def ratio_columns(name: str, times: pd.DataFrame, ours: str, peer: str) -> dict[str, float]:
    """Return the ratio `ours` / `peer` as three columns of a table: its median `name`, and its quartiles `name_q1` and
    `name_q3`."""
    ratio = ratios(times, ours, peer)
    return {name: ratio["ratio"], f"{name}_q1": ratio["q1"], f"{name}_q3": ratio["q3"]}


def speed_columns(times: pd.DataFrame, dense: str, pruned: str) -> dict[str, float]:
    """Return the columns of a model that is timed beside the dense model. `speedup` is the median, with quartiles, of
    the ratio dense / pruned of each round. `latency_ms` is the median time of the dense model divided by `speedup`, so
    that the two columns agree."""
    speed = ratio_columns("speedup", times, dense, pruned)
    return {"latency_ms": float(times[dense].median() / speed["speedup"]), **speed}


def device_name(device: Device) -> str:
    """Return the name of the GPU, or of the processor if the system tells it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    listing = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (listing.read_text().splitlines() if listing.exists() else [])
        if line.startswith("model name")
    ]
    return f"cpu ({names[0] if names else platform.machine()})"
