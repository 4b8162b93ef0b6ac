from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import pandas as pd
import pytest

from mhaprune.speed import in_turn, ratios


def test_a_round_makes_every_call_once_and_none_always_follows_the_same() -> None:
    made: list[str] = []
    times = in_turn({name: (lambda n=name: made.append(n)) for name in "abcdef"}, rounds=30, warmup=2)
    assert len(times) == 30
    assert list(times) == list("abcdef")
    rounds = [made[i : i + 6] for i in range(0, 6 * 32, 6)]
    assert all(sorted(one) == list("abcdef") for one in rounds)
    after_a = Counter(second for first, second in pairwise(made) if first == "a")
    assert max(after_a.values()) < 12


def test_milliseconds_are_milliseconds() -> None:
    times = in_turn({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.008)}, rounds=5)
    assert 2 <= times["short"].median() < 6
    assert 2 < ratios(times, "long", "short")["ratio"] <= 4.2


def test_ratios_are_taken_round_by_round() -> None:
    """A machine twice as slow in one round slows both: the ratio does not see it."""
    result = ratios(pd.DataFrame({"ours": [1.0, 2.0, 1.0], "peer": [2.0, 4.0, 2.0]}), "ours", "peer")
    assert result["ratio"] == result["q1"] == result["q3"] == pytest.approx(0.5)
