"""How long each step of a run usually takes, so that its progress line can say how much time is left in all."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mhaprune.progress import UNLIKE, doing
from mhaprune.storage.store import write_json

Clock = dict[str, dict[str, float]]
"""The seconds of the steps of runs, by the title of the run and the name of the step."""

NAME = "clock.json"
"""The file of a cache that holds a `Clock`."""
_in_memory: Clock = {}
"""The clock of those who have no cache."""


@contextmanager
def timed(title: str, steps: Sequence[str], seconds: Sequence[float] = (), cache: Path | None = None) -> Iterator[None]:
    """Show the body as a run with these steps. The time left is told from the last run with this title, whose seconds
    are kept in the folder `cache`, or in memory without one; the first time from the usual `seconds` of the steps.
    Without any only the time left in the present step is known."""
    before = _read(cache).get(title, {})
    with doing(title, parts=steps, usual=dict(zip(steps, seconds, strict=False)) | before) as step:
        yield
    # What came from the cache this time may have to be made the next time.
    took = {what: round(spent, 3) for what, spent in step.took.items() if spent > before.get(what, 0.0) / UNLIKE}
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
