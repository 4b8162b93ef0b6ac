from __future__ import annotations

import pytest

from mhaprune.progress import doing, duration, track, under_way


def said() -> list[tuple[str, int, int | None]]:
    return [(step.what, step.done, step.total) for step in under_way()]


def test_a_loop_says_how_far_it_is_and_where_it_belongs() -> None:
    seen = []
    with doing("score"):
        for name in track(["gate", "ablation"], "scorers", name=str.upper):
            for _ in track(iter("abc"), "masks"):
                pass
            *_, last = under_way()
            assert last.on is not None
            seen.append((name, last.on(), said()))
    assert seen == [
        ("gate", "GATE", [("score", 0, None), ("scorers", 0, 2)]),
        ("ablation", "ABLATION", [("score", 0, None), ("scorers", 1, 2)]),
    ]
    assert not under_way()


def test_a_loop_that_goes_on_counts_from_where_it_was() -> None:
    seen = [said() for _ in track(range(3, 5), "steps", done=3)]
    assert seen == [[("steps", 3, 5)], [("steps", 4, 5)]]


def test_nothing_is_left_under_way_after_a_break_or_an_error() -> None:
    for _ in track(range(9), "masks"):
        break
    assert not under_way()
    with pytest.raises(ZeroDivisionError), doing("run"), doing("score"):
        raise ZeroDivisionError
    assert not under_way()


def test_a_generator_that_ends_late_takes_no_other_step_with_it() -> None:
    late = track(range(2), "plans")
    with doing("first"):
        next(late)
    with doing("second"):
        late.close()
        assert said() == [("second", 0, None)]


def test_the_seconds_of_stages_are_kept_also_of_one_that_comes_again() -> None:
    with doing("run", stages={"score": 1, "prune": 2}) as whole:
        for stage in ("score", "prune", "score", "another"):
            with doing(stage):
                pass
    assert list(whole.spent) == ["score", "prune"]
    assert all(seconds >= 0 for seconds in whole.spent.values())


def test_a_name_is_asked_for_by_a_reader_only() -> None:
    def name(item: int) -> str:
        raise AssertionError("nobody looks")

    assert list(track([1, 2], "masks", name=name)) == [1, 2]


@pytest.mark.parametrize(("seconds", "text"), [(0, "10 s"), (44, "40 s"), (100, "2 min"), (7200, "2.0 h")])
def test_a_time_to_wait_is_a_round_number(seconds: float, text: str) -> None:
    assert duration(seconds) == text
