"""The steps of a run, one within another, and the progress line that shows them.

A step is a piece of work that counts its items; it does not know the terminal or the steps around it. A terminal shows
one bar; other outputs get a new line every few seconds.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TextIO, TypeVar

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

Item = TypeVar("Item")

EVERY = 9.0
"""Seconds between two progress lines. After 10 s without a line a reader begins to doubt."""
REDRAWN = 0.5
"""Seconds between two updates of the progress bar."""
BAR = "{percentage:3.0f}%|{bar:16}| {desc}"


@dataclass(eq=False)
class Step:
    """A piece of work in progress, which counts its items."""

    what: str
    total: int | None = None
    """The number of items; None if it is not known."""
    done: int = 0
    on: Callable[[], str] | None = None
    """A function that returns the name of the present item. It is called only when the progress line is written."""
    note: str = ""
    """A remark on the progress."""
    begun: float = field(default_factory=lambda: time.monotonic())
    before: int = 0
    """The number of items that were done before the step began, for example by an earlier run."""
    parts: Sequence[str] = ()
    """The names of the steps inside, if they are known, in their order."""

    @property
    def seconds(self) -> float:
        """The time since the step began."""
        return time.monotonic() - self.begun


under_way: list[Step] = []
"""The steps in progress, the outermost first."""


@contextmanager
def doing(what: str, total: int | None = None, done: int = 0, parts: Sequence[str] = ()) -> Iterator[Step]:
    """Show the body as a step of the progress, within the present step if there is one. `parts` are steps inside."""
    step = Step(what, total, done, before=done, parts=parts)
    under_way.append(step)
    try:
        yield step
    finally:
        if step in under_way:  # a step around it may have ended before, by an error in another generator
            del under_way[under_way.index(step) :]


def track(
    items: Iterable[Item],
    what: str,
    total: int | None = None,
    done: int = 0,
    name: Callable[[Item], str] | None = None,
) -> Iterator[Item]:
    """Yield the items. The progress line counts them as `what`, and shows the `name` of the present item."""
    if total is None and isinstance(items, Sized):
        total = done + len(items)
    with doing(what, total, done=done) as step:
        for item in items:
            if name is not None:
                step.on = lambda item=item: name(item)
            yield item
            step.done += 1


def duration(seconds: float) -> str:
    """Return a remaining time in words, rounded: `20 s`, `5 min`, `1.5 h`."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


_at_work = threading.Lock()
"""A lock, held while `shown` writes the progress line, so that a second `shown` writes none."""


@contextmanager
def shown(label: str = "", stream: TextIO | None = None, lines: bool = False) -> Iterator[None]:
    """Show the progress of the body on the stream, stderr by default. Each line begins with `label`, for example the
    label of a job in a sweep. With `lines` a terminal gets lines too, because the bars of parallel jobs would overwrite
    each other.

    A thread writes, so loops do not pause. Writing from the loops would not be enough: torch.compile, a call of another
    library and the wait for another process can take minutes without a loop. A `shown` within another one, or without a
    stderr, shows nothing.
    """
    to: TextIO | None = stream or sys.stderr
    if to is None or not _at_work.acquire(blocking=False):
        yield
        return
    with ExitStack() as stack:
        stack.callback(_at_work.release)
        bar, over = None, threading.Event()
        if to.isatty() and not lines:
            bar = stack.enter_context(tqdm(total=1.0, file=to, bar_format=BAR, leave=False, dynamic_ncols=True))
            stack.enter_context(logging_redirect_tqdm())  # else a line of the log would end up inside the bar

        def look() -> None:
            while not over.wait(EVERY if bar is None else REDRAWN):
                if steps := list(under_way):
                    _show(steps, label, to, bar)

        thread = threading.Thread(target=look, name="progress line", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        yield


def _show(steps: Sequence[Step], label: str, to: TextIO, bar: tqdm | None) -> None:
    if bar is None:
        print(line(steps, label), file=to, flush=True)
    else:
        bar.n = _share(steps)
        bar.set_description_str(line(steps, label))


def line(steps: Sequence[Step], label: str = "") -> str:
    """Return the progress line for these steps, for example `ablate on sort, step 5 of 7: recover 4 of 9, about 20 s
    left, 12 of 24 heads: refit 3 of 8`. The time left is that of the outermost step that counts items."""
    left, counted = seconds_left(steps), _counted(steps)
    words = [_words(step, left if place == counted else None) for place, step in enumerate(steps)]
    if len(steps) > 1 and steps[1].what in (parts := steps[0].parts):
        words[0] += f", step {parts.index(steps[1].what) + 1} of {len(parts)}"
    return ": ".join([label, *words] if label else words)


def _words(step: Step, left: float | None) -> str:
    count = f" {min(step.done + 1, step.total)} of {step.total}" if step.total is not None and step.total > 1 else ""
    time_left = "" if left is None else f"about {duration(left)} left"  # early, as a narrow terminal cuts the end
    return ", ".join(filter(None, [step.what + count, time_left, step.on() if step.on is not None else "", step.note]))


def _counted(steps: Sequence[Step]) -> int:
    """Return the place of the outermost step that counts its items; `len(steps)` if none does."""
    return next((place for place, step in enumerate(steps) if step.total), len(steps))


def seconds_left(steps: Sequence[Step]) -> float | None:
    """Return the seconds until the outermost step that counts its items ends, by the share that is finished and the
    time that it took. Return None before a tenth of it is finished: the first items are seldom like the others."""
    share = _share(steps)
    return steps[_counted(steps)].seconds * (1 - share) / share if share >= 0.1 else None


def _share(steps: Sequence[Step]) -> float:
    """Return the finished share (0 to 1) of the items of the outermost step that counts. Its present item counts by the
    finished share of the steps inside it."""
    if (place := _counted(steps)) == len(steps):
        return 0.0
    step = steps[place]
    assert step.total is not None
    to_do = step.total - step.before
    return min(1.0, (step.done - step.before + _share(steps[place + 1 :])) / to_do) if to_do > 0 else 1.0
