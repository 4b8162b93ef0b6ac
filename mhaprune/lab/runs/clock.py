"""The time that each step of a run usually takes, so that its progress line can say how much is left in all."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from mhaprune.progress import EARLY, Step, doing, part_of, share_of
from mhaprune.storage.store import write_json

Clock = dict[str, dict[str, float]]
"""The seconds of the steps of runs, by the title of the run and the name of the step."""

NAME = "clock.json"
"""The file of a cache that holds a `Clock`."""
UNLIKE = 10
"""A part that took so many times what it usually takes, or so small a part of it, did something else: trained a model
that the last run took from the cache, for example. It says nothing about how fast this run is."""
_in_memory: Clock = {}
"""The clock of those who have no cache."""


@contextmanager
def timed(title: str, steps: Sequence[str], seconds: Sequence[float] = (), cache: Path | None = None) -> Iterator[None]:
    """Show the body as a run with these steps. The time left is told from the last run with this title, whose seconds
    are kept in the folder `cache`, or in memory without one; the first time from the usual `seconds` of the steps.
    Without any only the time left in the present step is known."""
    before = _read(cache).get(title, {})
    usual = dict(zip(steps, seconds, strict=False)) | before
    with doing(title, parts=steps, left=partial(left_in_all, usual) if usual else None) as step:
        yield
    # What came from the cache this time may have to be made the next time, so a time falls by half at most.
    took = {what: round(max(spent, usual.get(what, 0.0) / 2), 3) for what, spent in step.took.items()}
    clock = _read(cache) | {title: before | took}
    if cache is None:
        _in_memory.update(clock)
    else:
        with suppress(OSError):  # a cache may be for reading only
            write_json(cache / NAME, clock)


def _read(cache: Path | None) -> Clock:
    if cache is None:
        return _in_memory
    try:
        found = json.loads((cache / NAME).read_bytes())
        return {title: {step: float(spent) for step, spent in took.items()} for title, took in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):  # none, or not one of ours
        return {}


def left_in_all(usual_seconds: Mapping[str, float], steps: Sequence[Step]) -> float | None:
    """Return the seconds until the outermost step ends; None between its parts. They are what is left of the present
    part, by its own count if it has one, and the `usual_seconds` of the parts after it, times how much slower than
    usual this run is."""
    outer, place = steps[0], part_of(steps)
    if place is None:
        return None
    now, share = steps[1], share_of(steps[1:])
    seconds = outer.took.get(now.what, 0.0) + now.seconds
    usual = usual_seconds.get(now.what, 0.0)
    after = sum(usual_seconds.get(part, 0.0) for part in outer.parts[place + 1 :])
    done = [(took, usual_seconds.get(what, 0.0)) for what, took in outer.took.items() if what != now.what]
    alike = [(took, expected) for took, expected in done if expected / UNLIKE < took < expected * UNLIKE]
    to_come = max(usual + after, 1e-9)  # the more is to come, the less do a few parts say about it
    pace = (sum(took for took, _ in alike) + to_come) / (sum(expected for _, expected in alike) + to_come)
    left = by_habit = max(0.0, pace * usual - seconds)
    if share >= EARLY:  # items may be unlike, and so may be this run and the last one: neither is trusted alone
        left = now.seconds * (1 - share) / share
        if usual / UNLIKE < seconds / share < usual * UNLIKE:
            left = (left + by_habit + (1 - share) * pace * usual) / 3
    return left + pace * after
