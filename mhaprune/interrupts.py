"""What asks a run to stop: signals and a time limit. What can go on later saves its state before it stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""From a terminal, from a scheduler or `kill`, and from a scheduler shortly before its time is over."""


class TimeLimit(ValueError):
    """The time for a run is over."""


class Held:
    """Holds signals back while a loop is in the middle of a step, where its state is worth nothing.

    The loop looks at `asked` at the end of each step. If a signal has come it saves and calls `stop`: there the signal
    does what it would have done at once. Signals are Python's main thread's, so in another thread nothing is held back.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self.handlers: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return bool(self.came)

    def stop(self) -> None:
        """Let the first signal that came do what it does; returns if that does not raise."""
        self.__exit__(None, None, None)
        self.__enter__()

    def __enter__(self) -> Held:
        if threading.current_thread() is threading.main_thread():
            for number in (*SIGNALS, signal.SIGALRM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self.handlers[number] = signal.signal(number, self._hold)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers.clear()
        came, self.came = self.came, []
        if came and kind is None:
            signal.raise_signal(came[0])

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self.came.append(number)


@contextmanager
def interruptible() -> Iterator[None]:
    """Every signal that asks to stop raises KeyboardInterrupt while the body runs; ignored ones stay ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
