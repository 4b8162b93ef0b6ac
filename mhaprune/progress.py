"""The steps of a run, one within another, and the progress line that shows them.

A step is a piece of work that counts its items; it does not know the terminal or the steps around it. A terminal shows
one bar; other outputs get a new line every few seconds.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TextIO, TypeVar

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

Item = TypeVar("Item")
Stages = Mapping[str, float]
"""The parts of a step in their order, each with the seconds that it usually takes."""
NO_STAGES: Stages = MappingProxyType({})

EVERY = 9.0
"""Seconds between two progress lines. After 10 s without a line a reader begins to doubt."""
REDRAWN = 0.5
"""Seconds between two updates of the progress bar."""
BAR = "{percentage:3.0f}%|{bar:16}| {desc}"
SLOWEST = 0.2
"""The smallest ratio of the measured to the usual time of a stage that is believed. No machine counts as more than 1 /
`SLOWEST` times as fast as the machine on which the stages were timed."""


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
    stages: Stages = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    """The seconds of the finished stages."""
    begun: float = field(default_factory=lambda: time.monotonic())
    before: int = 0
    """The number of items that were done before the step began, for example by an earlier run."""

    @property
    def seconds(self) -> float:
        """The time since the step began."""
        return time.monotonic() - self.begun


under_way: list[Step] = []
"""The steps in progress, the outermost first."""


@contextmanager
def doing(what: str, total: int | None = None, stages: Stages = NO_STAGES, done: int = 0) -> Iterator[Step]:
    """Show the body as a step of the progress, within the present step if there is one."""
    around = under_way[-1] if under_way else None
    step = Step(what, total, done, stages=stages, before=done)
    under_way.append(step)
    try:
        yield step
    finally:
        if step in under_way:  # a step around it may have ended before, by an error in another generator
            del under_way[under_way.index(step) :]
        if around is not None and what in around.stages:
            around.spent[what] = around.spent.get(what, 0.0) + step.seconds


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
        return f"{max(10, round(seconds, -1)):.0f} s"
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
        return
    left, gone = seconds_left(steps), steps[0].seconds
    if left is not None:
        bar.n = max(bar.n, min(1.0, gone / (gone + left)))  # the bar never goes back
    bar.set_description_str(line(steps, label))


def line(steps: Sequence[Step], label: str = "") -> str:
    """Return the progress line for these steps, for example `ablate on sort, about 20 s left: recover 4 of 9, 12 of 24
    heads: refit 3 of 8`."""
    left = seconds_left(steps)
    words = [_words(step) for step in steps]
    if left is not None:
        words[0] += f", about {duration(left)} left"
    return ": ".join([label, *words] if label else words)


def _words(step: Step) -> str:
    count = f" {min(step.done + 1, step.total)} of {step.total}" if step.total is not None and step.total > 1 else ""
    return ", ".join(filter(None, [step.what + count, step.on() if step.on is not None else "", step.note]))


def seconds_left(steps: Sequence[Step]) -> float | None:
    """Return the seconds until the outermost step ends.

    Without stages, the finished share tells. Otherwise the remaining stages are assumed to take their usual time, at
    the speed of the finished stages on this machine. A stage that took almost no time is not used for the speed: the
    model came from the cache. Return None if nothing that is counted is finished, and the usual time of the present
    stage is over or not known.
    """
    whole, stages, spent = steps[0], list(steps[0].stages), dict(steps[0].spent)  # a copy: the run may change it
    if not stages:
        counted = next((n for n, step in enumerate(steps) if step.total), 0)
        share = _share(steps[counted:])
        return steps[counted].seconds * (1 - share) / share if share else None
    now = steps[1].what if len(steps) > 1 and steps[1].what in stages else None
    begun = [name for name in stages if name in spent or name == now]
    to_come = stages[stages.index(begun[-1]) + 1 :] if begun else stages
    told = [name for name in spent if spent[name] > SLOWEST * whole.stages[name]]
    usual = sum(whole.stages[name] for name in told)
    speed = max(SLOWEST, sum(spent[name] for name in told) / usual) if usual else 1.0
    left = speed * sum(whole.stages[name] for name in to_come)
    if now is not None:
        gone, share = steps[1].seconds, _share(steps[1:])
        if not share and gone > speed * whole.stages[now]:
            return None
        left += gone * (1 - share) / share if share else speed * whole.stages[now] - gone
    return left


def _share(steps: Sequence[Step]) -> float:
    """Return the finished share (0 to 1) of the items of `steps[0]`. Its present item counts by the finished share of
    `steps[1:]`, the steps inside it. A step that counts no items is as far as the step inside it."""
    if not steps:
        return 0.0
    if not steps[0].total:
        return _share(steps[1:])
    step, to_do = steps[0], steps[0].total - steps[0].before
    return min(1.0, (step.done - step.before + _share(steps[1:])) / to_do) if to_do > 0 else 1.0
