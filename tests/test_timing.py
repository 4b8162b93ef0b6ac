from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import pandas as pd
import pytest
import torch

from mhaprune.measure.times import (
    COPIES,
    copies,
    device_name,
    in_turn,
    ratios,
)


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


class Event:
    """A CUDA event for a machine without a GPU: it is there as soon as it is recorded."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the GPU that is not there."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    return asked


def test_on_a_gpu_its_own_events_tell_the_time(gpu: list[str]) -> None:
    times = in_turn({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.008)}, 3, device="cuda")
    assert 2 <= times["short"].median() < 6
    assert 8 <= times["long"].median() < 14
    assert gpu == ["synchronize"] * 10, "before every call, those of the warm-up included"
    assert device_name("cuda") == "name of cuda"


def test_copies_are_made_among_each_other() -> None:
    made: list[str] = []
    models = copies({name: lambda n=name: made.append(n) or f"{n}{len(made)}" for name in "abc"})
    assert {name: len(set(own)) for name, own in models.items()} == dict.fromkeys("abc", COPIES)
    rounds = [made[i : i + 3] for i in range(0, 3 * COPIES, 3)]
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len({"".join(one) for one in rounds}) > 1
