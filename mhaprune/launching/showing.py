"""One line for the whole of a run: a bar at a terminal; where stderr is none, a line every few seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from mhaprune.progress import Step, duration, under_way

EVERY = 9.0
"""Seconds between two lines. A reader who sees nothing for 10 s begins to doubt."""
REDRAWN = 0.5
"""Seconds between two looks of a bar."""
BAR = "{percentage:3.0f}%|{bar:16}| {desc}"
_at_work = threading.Lock()
"""Held while a line is shown."""
SLOWEST = 0.2
"""No machine is taken for more than 1 / this times as fast as the one on which stages were timed."""


@contextmanager
def shown(label: str = "", stream: TextIO | None = None, lines: bool = False) -> Iterator[None]:
    """Say on the stream, stderr by default, what the body is doing. A job of a sweep has its label before each line.
    `lines` says it in lines at a terminal too: the bars of jobs that run side by side would overwrite each other.

    A thread looks and writes, so no loop pauses for it. Looking from the loops alone would not do: torch.compile, a
    call into another library and the wait for a process that trains the same model come by no loop for minutes.
    Within another body of this kind, which shows all, and without a stderr nothing more is shown.
    """
    to: TextIO | None = stream or sys.stderr
    if to is None or not _at_work.acquire(blocking=False):
        yield
        return
    with ExitStack() as stack:
        stack.callback(_at_work.release)
        if to.isatty() and not lines:
            bar = tqdm(total=1.0, file=to, bar_format=BAR, leave=False, dynamic_ncols=True)
            stack.enter_context(bar)
            stack.enter_context(logging_redirect_tqdm())  # else a line of the log would end up inside the bar
            stack.enter_context(_repeating(lambda steps: _draw(bar, steps, label), REDRAWN))
        else:
            stack.enter_context(_repeating(lambda steps: print(line(steps, label), file=to, flush=True), EVERY))
        yield


@contextmanager
def _repeating(show: Callable[[Sequence[Step]], object], pause: float) -> Iterator[None]:
    over = threading.Event()

    def look() -> None:
        while not over.wait(pause):
            if steps := under_way():
                show(steps)

    thread = threading.Thread(target=look, name="progress line", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _draw(bar: tqdm, steps: Sequence[Step], label: str) -> None:
    left, gone = seconds_left(steps), steps[0].seconds
    if left is not None:
        bar.n = max(bar.n, min(1.0, gone / (gone + left)))  # a bar that went back would be no comfort
    bar.set_description_str(line(steps, label))


def line(steps: Sequence[Step], label: str = "") -> str:
    """For example `ablate on sort, about 20 s left: recover 4 of 9, 12 of 24 heads: refit 3 of 8`."""
    left = seconds_left(steps)
    words = [_words(step) for step in steps]
    if left is not None:
        words[0] += f", about {duration(left)} left"
    return ": ".join([*([label] if label else []), *words])


def _words(step: Step) -> str:
    words = step.what
    if step.total is not None and step.total > 1:
        words += f" {min(step.done + 1, step.total)} of {step.total}"
    return ", ".join([words, *([step.on()] if step.on is not None else []), *([step.note] if step.note else [])])


def seconds_left(steps: Sequence[Step]) -> float | None:
    """Return how long the outermost step will still take; None where that is not known: it has no stages, or the
    present one takes longer than usual and does not say how far it is.

    The stages to come take what they usually take, on a machine as fast as this one has been in those that are over.
    A stage that took next to nothing does not tell: the model has come from the cache.
    """
    whole, stages, spent = steps[0], list(steps[0].stages), dict(steps[0].spent)  # a copy: the run goes on meanwhile
    if not stages:
        return None
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
    """Return how much of the first step is done of what it had to do, by its items and what they cost; 0 where their
    number is not known."""
    if not steps or not steps[0].total:
        return 0.0
    step, done, total = steps[0], steps[0].done, steps[0].total
    costs = step.costs or [1.0] * total
    to_do = sum(costs[step.before :])
    here = _share(steps[1:]) * costs[done] if done < len(costs) else 0.0
    return min(1.0, (sum(costs[step.before : done]) + here) / to_do) if to_do > 0 else 1.0
