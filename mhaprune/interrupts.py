"""What asks a run to stop: signals and a time limit. What can go on later saves its state before it stops."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""From a terminal, from a scheduler or `kill`, and two that schedulers send shortly before the time is over."""


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


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handling(make: Callable[[Callable[[], None]], Handler]) -> Iterator[None]:
    """Handle the signals that ask to stop while the body runs; ignored ones stay ignored.

    `make` is given what brings back the handlers of before. Signals are Python's main thread's, so in another thread
    nothing is handled.
    """
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        known = {number: signal.getsignal(number) for number in SIGNALS}
        before |= {number: handler for number, handler in known.items() if handler not in (signal.SIG_IGN, None)}
        for number in before:
            signal.signal(number, make(restore))
    try:
        yield
    finally:
        restore()


def interruptible() -> AbstractContextManager[None]:
    """Every signal that asks to stop raises KeyboardInterrupt while the body runs."""
    return handling(lambda restore: signal.default_int_handler)


def interruptible_once() -> AbstractContextManager[None]:
    """The first signal that asks to stop raises KeyboardInterrupt while the body runs, later ones do nothing.

    A terminal signals all processes of a job, and the one that waits for the others passes the signal on.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    return handling(lambda restore: stop)


def before_stopping(first: Callable[[], None]) -> AbstractContextManager[None]:
    """On a signal that asks to stop do something first, and then what the signal would have done.

    A second signal does not wait for it. Copies of this process have nothing to do first.
    """
    process = os.getpid()

    def make(restore: Callable[[], None]) -> Handler:
        def handle(number: int, frame: FrameType | None) -> None:
            restore()
            if os.getpid() == process:
                first()
            signal.raise_signal(number)

        return handle

    return handling(make)


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Put back the handlers that the body replaces."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
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
