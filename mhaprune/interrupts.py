"""Signals and a time limit, which ask a run to stop. What can go on later saves its state before it stops.

Signals are Python's main thread's, so in another thread nothing is handled; and a signal that is ignored stays ignored.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""From a terminal, from a scheduler or `kill`, and two that schedulers send shortly before the time is over."""
Handler = Callable[[int, FrameType | None], None]


class TimeLimit(ValueError):
    """The time for a run is over."""


def _handlers(*more: int) -> dict[int, Any]:
    """Return the handlers of the signals that can be handled here."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in (*SIGNALS, *more)}
    return {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}


def _set(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


class HeldSignals:
    """Holds signals back while a loop is in the middle of a step, where its state is worth nothing.

    The loop looks at `asked` at the end of each step. If a signal has come it saves and calls `stop`: there the signal
    does what it would have done at once.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self.handlers: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """True once a signal has come."""
        return bool(self.came)

    def stop(self) -> None:
        """Let the first signal that came do what it does; returns if that does not raise."""
        self.__exit__(None, None, None)
        self.__enter__()

    def __enter__(self) -> HeldSignals:
        self.handlers = _handlers(signal.SIGALRM)
        _set(dict.fromkeys(self.handlers, lambda number, frame: self.came.append(number)))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        handlers, self.handlers = self.handlers, {}  # once: a handler may have set others since
        came, self.came = self.came, []
        _set(handlers)
        if came and kind is None:
            signal.raise_signal(came[0])


@contextmanager
def handling(handler: Handler | None = None, before: Mapping[int, Any] | None = None) -> Iterator[None]:
    """Handle the signals that ask to stop by `handler`, if any, while the body runs. The handlers of `before`, by
    default those of now, are put back at the end, also where the body replaces them."""
    before = _handlers() if before is None else before
    if handler is not None:
        _set(dict.fromkeys(before, handler))
    try:
        yield
    finally:
        _set(before)


def interruptible() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on every signal that asks to stop while the body runs."""
    return handling(signal.default_int_handler)


def interruptible_once() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on the first signal that asks to stop while the body runs; later ones do nothing.

    A terminal signals all processes of a job, and the one that waits for the others passes the signal on.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        _set(dict.fromkeys(SIGNALS, signal.SIG_IGN))
        raise KeyboardInterrupt

    return handling(stop)


def before_stopping(first: Callable[[], None]) -> AbstractContextManager[None]:
    """Do something first on a signal that asks to stop, and then what the signal would have done.

    A second signal does not wait for it. Copies of this process have nothing to do first.
    """
    process, before = os.getpid(), _handlers()

    def stop(number: int, frame: FrameType | None) -> None:
        _set(before)
        if os.getpid() == process:
            first()
        signal.raise_signal(number)

    return handling(stop, before)


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Raise `TimeLimit` in the body after so many seconds; None is no limit."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TimeLimit(f"time_limit={seconds:g}: stopped after {seconds:g} s; the same command goes on from there")

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
