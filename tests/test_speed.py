from __future__ import annotations

import time

import pandas as pd
import pytest

from mhaprune.speed import in_turn, ratios


def test_calls_are_made_in_turn_and_the_order_turns() -> None:
    made: list[str] = []
    times = in_turn({name: (lambda n=name: made.append(n)) for name in "abc"}, rounds=3, warmup=1)
    assert len(times) == 3
    assert list(times) == ["a", "b", "c"]
    rounds = ["".join(made[i : i + 3]) for i in range(0, 12, 3)]
    assert rounds == ["cab", "abc", "bca", "cab"]


def test_milliseconds_are_milliseconds() -> None:
    times = in_turn({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.008)}, rounds=5)
    assert 2 <= times["short"].median() < 6
    assert 2 < ratios(times, "long", "short")["ratio"] <= 4.2


def test_ratios_are_taken_round_by_round() -> None:
    """A machine twice as slow in one round slows both: the ratio does not see it."""
    result = ratios(pd.DataFrame({"ours": [1.0, 2.0, 1.0], "peer": [2.0, 4.0, 2.0]}), "ours", "peer")
    assert result["ratio"] == result["q1"] == result["q3"] == pytest.approx(0.5)
