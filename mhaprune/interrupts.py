"""Signals and a time limit that ask a run to stop.

Before a run stops, it saves the state of work that can be continued. Python handles signals only in the main thread, so
in other threads these functions do nothing. An ignored signal stays ignored.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that ask a run to stop: from a terminal, from a scheduler or `kill`, and two that a scheduler sends
shortly before the time is over."""
Handler = Callable[[int, FrameType | None], None]
IMPORTING = "<frozen importlib._bootstrap>"
"""The file of the functions of Python that import a module."""
AGAIN = 0.1
"""Seconds after which a limit that came in an import is tried again."""


class TimeLimit(ValueError):
    """Raised when the time for a run is over."""


def _handlers(*more: int) -> dict[int, Any]:
    """Return the present handlers of `SIGNALS` and of the signals `more`, without ignored signals. Empty outside the
    main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in (*SIGNALS, *more)}
    return {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}


def _set(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


class HeldSignals:
    """Delays signals while a loop is in the middle of a step, when its state cannot be saved.

    The loop checks `asked` at the end of each step. If `asked` is True, the loop saves its state and calls `stop`. Then
    the delayed signal has the effect that it would have had at once.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self.handlers: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """True once a signal has come."""
        return bool(self.came)

    def stop(self) -> None:
        """Let the first delayed signal take effect now. Return only if the handler of the signal does not raise."""
        self.__exit__(None, None, None)
        self.__enter__()

    def __enter__(self) -> HeldSignals:
        self.handlers = _handlers(signal.SIGALRM)
        _set(dict.fromkeys(self.handlers, lambda number, frame: self.came.append(number)))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        handlers, self.handlers = self.handlers, {}  # only once: a handler may have set others since
        came, self.came = self.came, []
        _set(handlers)
        if came and kind is None:
            signal.raise_signal(came[0])


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Handle the signals that ask to stop by `handler` while the body runs. At the end, set the handlers that were set
    at the beginning, even if the body has set others."""
    before = _handlers()
    _set(dict.fromkeys(before, handler))
    try:
        yield
    finally:
        _set(before)


def interruptible() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on every signal that asks to stop while the body runs."""
    return handling(signal.default_int_handler)


def _imports(frame: FrameType | None) -> int:
    """Return how many frames of an import are around a frame."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == IMPORTING
        frame = frame.f_back
    return count


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Raise `TimeLimit` in the body after this number of seconds; None means no limit. An import is not stopped, as it
    would leave half a module to later jobs of the process."""
    before_body = _imports(sys._getframe())

    def over(number: int, frame: FrameType | None) -> None:
        if _imports(frame) > before_body:
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
            return
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
