import importlib
import signal
import threading
import time
from pathlib import Path

import pytest

from mhaprune.interrupts import (
    SIGNALS,
    HeldSignals,
    TimeLimit,
    interruptible,
    limited,
)

pytestmark = pytest.mark.usefixtures("as_in_a_terminal")


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_until_the_loop_has_saved(number: signal.Signals) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interruptible(), HeldSignals() as held:  # noqa: PT012 (a loop is stopped)
        for step in range(5):
            if step == 2:
                signal.raise_signal(number)
            done.append(step)
            if held.asked:
                held.stop()
    assert done == [0, 1, 2]


def test_a_signal_in_the_last_step_is_not_lost() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldSignals():  # noqa: PT012 (what is done before counts)
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]


def test_what_does_not_raise_stops_nothing() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    with HeldSignals() as held:
        for step in range(3):
            signal.raise_signal(signal.SIGUSR1)
            assert held.asked
            held.stop()
            assert len(came) == step + 1
    signal.signal(signal.SIGUSR1, before)


def test_handlers_are_as_they_were() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with interruptible(), HeldSignals(), limited(60):
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible(), HeldSignals() as held:
        signal.raise_signal(signal.SIGINT)
        assert not held.asked
    signal.signal(signal.SIGINT, before)


def test_another_thread_has_no_signals() -> None:
    asked = []

    def loop() -> None:
        with interruptible(), HeldSignals() as held:
            asked.append(held.asked)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert asked == [False]


def test_a_time_limit_stops_what_takes_longer() -> None:
    with limited(None), limited(5):
        pass
    with pytest.raises(TimeLimit, match=r"time_limit=0\.05: stopped after 0\.05 s"), limited(0.05):
        time.sleep(5)


def test_a_time_limit_leaves_no_half_imported_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.3)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TimeLimit), limited(0.05):  # noqa: PT012 (the limit comes in the import)
        module = importlib.import_module("slow_to_import")
        time.sleep(5)
    assert module.whole
