"""Times of calls, measured side by side: in turn, in one process, against noise that is measured too."""

import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch

from mhaprune.progress import track

COPIES = 4
"""Number of copies of each model that take turns: the place of its weights in memory alone can make one of two equal
models 1 % faster."""
COPIES_BYTES = 2**31
"""How much memory all of them may take."""

PROGRAMS = 10_000
"""The largest number of programs that torch.compile may make for one layer."""

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
    """Milliseconds of every call (columns) in every round (rows), after `warmup` rounds that do not count.

    A round makes each call once, in a new random order, so that no call always follows the same neighbour. On a machine
    with other work `time.process_time` as the `clock` counts only the seconds that the processor gave to this process.
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
    """Return how long one call takes: on a GPU between two of its own events, else by the clock."""
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


def copies_that_fit(size: int, models: int) -> int:
    """Return how many copies of each model there should be, at most `COPIES`, if one takes `size` bytes. Where it
    lies matters less the larger it is."""
    return max(1, min(COPIES, COPIES_BYTES // max(1, size * models)))


def copies(makers: Mapping[str, Callable[[], Model]], number: int = COPIES) -> dict[str, list[Model]]:
    """`number` of what each maker makes, made in a random order.

    Neighbours in memory, all copies of one model could be 2 % slower than all of another.
    """
    made: dict[str, list[Model]] = {name: [] for name in makers}
    draw = random.Random(0)
    for _ in range(number):
        for name in draw.sample(list(makers), len(makers)):
            made[name].append(makers[name]())
    return made


def taking_turns(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A call that makes the next of these calls in turn."""
    turns = cycle(calls)
    return lambda: next(turns)()


def many_programs() -> AbstractContextManager[Any]:
    """While this lasts, torch.compile makes a program for every shape of a layer, one for every number of heads. Beyond
    eight it would go on without a word, uncompiled."""
    import torch._dynamo  # slow to import, and seldom needed

    return torch._dynamo.config.patch(recompile_limit=PROGRAMS, accumulated_recompile_limit=PROGRAMS)


def ratios(times: pd.DataFrame, ours: str, peer: str) -> pd.Series:
    """Median and quartiles of `ours` over `peer`, taken round by round: what slows the machine down slows both."""
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
    """The ratio of `ratios` as three columns of a table: `name`, `name_q1` and `name_q3`."""
    ratio = ratios(times, ours, peer)
    return {name: ratio["ratio"], f"{name}_q1": ratio["q1"], f"{name}_q3": ratio["q3"]}


def speed_columns(times: pd.DataFrame, dense: str, pruned: str) -> dict[str, float]:
    """The columns of a model that is timed beside the dense one. `speedup` is the median of dense over pruned, round by
    round, with quartiles; `latency_ms` is the dense model's median divided by it, so that the two always agree."""
    speed = ratio_columns("speedup", times, dense, pruned)
    return {"latency_ms": float(times[dense].median() / speed["speedup"]), **speed}


def device_name(device: Device) -> str:
    """The name of the GPU, or of the processor if the system tells it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    listing = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (listing.read_text().splitlines() if listing.exists() else [])
        if line.startswith("model name")
    ]
    return f"cpu ({names[0] if names else platform.machine()})"
