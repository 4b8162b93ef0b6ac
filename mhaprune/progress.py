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
BAR_WIDTH = 24
"""Columns of the bar before its text."""
EARLY = 0.1
"""Before this share is finished no time left is shown: the first items are seldom like the others."""
LONG = 60.0
"""Seconds from which an expected time is said at once."""


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
    left: Callable[[Sequence["Step"]], float | None] | None = None
    """A function that returns the seconds until the end, given the steps in progress, if more is known than counts."""
    furthest: float = 0.0
    """The largest share that the bar showed as finished. An estimate may fall, a bar does not."""
    took: dict[str, float] = field(default_factory=dict)
    """The seconds that each finished part took."""
    expected: float | None = None
    """The seconds that the step will take in all, if that is known before it begins."""

    @property
    def seconds(self) -> float:
        """The time since the step began."""
        return time.monotonic() - self.begun


under_way: list[Step] = []
"""The steps in progress, the outermost first."""


@contextmanager
def doing(
    what: str,
    total: int | None = None,
    done: int = 0,
    parts: Sequence[str] = (),
    left: Callable[[Sequence[Step]], float | None] | None = None,
) -> Iterator[Step]:
    """Show the body as a step of the progress, within the present step if there is one. `parts` are steps inside; for
    `left` see `Step`."""
    step = Step(what, total, done, before=done, parts=parts, left=left)
    around = under_way[-1] if under_way else step
    under_way.append(step)
    try:
        yield step
    finally:
        if what in around.parts:
            around.took[what] = around.took.get(what, 0.0) + step.seconds
        if step in under_way:  # a step around it may have ended before, by an error in another generator
            del under_way[under_way.index(step) :]


def track(
    items: Iterable[Item],
    what: str,
    total: int | None = None,
    done: int = 0,
    name: Callable[[Item], str] | None = None,
    expected: float | None = None,
) -> Iterator[Item]:
    """Yield the items. The progress line counts them as `what`, shows the `name` of the present item, and says from the
    beginning how long they take if more than a minute is `expected`."""
    if total is None and isinstance(items, Sized):
        total = done + len(items)
    with doing(what, total, done=done) as step:
        step.expected = expected
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
        steps[0].furthest = bar.n = max(steps[0].furthest, finished(steps))
        bar.set_description_str(line(steps, label, (bar.ncols or 120) - BAR_WIDTH))


def line(steps: Sequence[Step], label: str = "", width: int | None = None) -> str:
    """Return the progress line for these steps, for example `ablate on sort, step 5 of 8, about 1 min left in all:
    recover 4 of 9, 12 of 24 heads: refit 3 of 8`. If nothing is known about the parts of the outermost step, the time
    left is that of the present one, `left in this step`. With a `width` the innermost steps are left out if they do not
    fit."""
    outer, inside = steps[0], steps[1:]
    first = _words(outer)
    if (place := part_of(steps)) is not None:
        first += f", step {place + 1} of {len(outer.parts)}"
    if (left := seconds_left(steps)) is not None:
        first += f", about {duration(left)} left"
        first += " in all" if outer.left else "" if outer.total else " in this step"
    words = [label, first] if label else [first]
    said = {outer.what}
    for step in inside:
        added = _words(step)
        if added in said:  # by the name of an item, as a scorer
            continue
        said |= {added, step.what, step.on() if step.on is not None else ""}
        if width is not None and len(": ".join([*words, added])) > width:
            break
        words.append(added)
    return ": ".join(words)


def _words(step: Step) -> str:
    count = f" {min(step.done + 1, step.total)} of {step.total}" if step.total is not None and step.total > 1 else ""
    on = step.on() if step.on is not None else ""
    return ", ".join(filter(None, [step.what + count, "" if on == step.what else on, step.note]))


def part_of(steps: Sequence[Step]) -> int | None:
    """Return the place of the present step among the parts of the outermost one; None if it is not one of them."""
    outer = steps[0]
    return outer.parts.index(steps[1].what) if len(steps) > 1 and steps[1].what in outer.parts else None


def seconds_left(steps: Sequence[Step]) -> float | None:
    """Return the seconds until the outermost step ends, if that is known; else until the outermost step that counts its
    items ends. Before a tenth of it is finished, return None, or what is left of a long time that was expected."""
    outer = steps[0]
    if outer.left is not None:
        left = outer.left(steps)
        return left if left is not None and outer.seconds >= EARLY * (outer.seconds + left) else None
    place = next((place for place, step in enumerate(steps) if step.total), None)
    if place is None:
        return None
    begun, share = steps[place].seconds, share_of(steps)
    if share < EARLY:
        total = foreseen(steps[place:])
        return total - begun if total >= LONG and total > begun else None
    return begun * (1 - share) / share


def foreseen(steps: Sequence[Step]) -> float:
    """Return the seconds that the first step takes in all, told from an expected one inside; 0 if there is none."""
    times = 1.0
    for step in steps:
        if step.expected is not None:
            return times * step.expected
        times *= step.total - step.before if step.total else 1
    return 0.0


def share_of(steps: Sequence[Step]) -> float:
    """Return the finished share (0 to 1) of the items of the outermost step that counts. Its present item counts by the
    finished share of the steps inside it."""
    place = next((place for place, step in enumerate(steps) if step.total), len(steps))
    if place == len(steps):
        return 0.0
    step = steps[place]
    assert step.total is not None
    to_do = step.total - step.before
    return min(1.0, (step.done - step.before + share_of(steps[place + 1 :])) / to_do) if to_do > 0 else 1.0


def finished(steps: Sequence[Step]) -> float:
    """Return the finished share (0 to 1) of the outermost step, for the bar: by time, or by its parts, or by counts."""
    outer, place = steps[0], part_of(steps)
    if outer.left is not None and (left := outer.left(steps)) is not None:
        return outer.seconds / max(outer.seconds + left, 1e-9)
    if outer.parts:
        return 0.0 if place is None else (place + share_of(steps[1:])) / len(outer.parts)
    return share_of(steps)
