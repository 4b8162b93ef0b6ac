from __future__ import annotations

import math
from typing import Any

import pytest

from learnt import collected, history, run, sweep, tables
from mhaprune.experiments.learn.study import Learn
from mhaprune.experiments.learn.words import paired_ratios
from mhaprune.statistics.intervals import geometric_mean
from mhaprune.tables import Tables


def common(found: Tables) -> list[str]:
    return list(Learn.say_in_common(found))


def test_what_is_said(snapshot: Any) -> None:
    tasks = [
        (task, f"task={task}, rate={name}", seed, run(at * factor))
        for task, factor in (("sort", 1), ("copy", 2))
        for name, at in (("slow", 40), ("fast", 10 * factor))
        for seed in (0, 1, 2)
    ]
    first = [("sort", "task=sort", 0, run(40)), ("sort", "task=sort, a=1", 0, run(20))]
    uneven = [("sort", "", seed, run(40, ms_per_step=ms)) for seed, ms in enumerate((20, 30))]
    one = {
        "a run that stays at its target": tables(history(0, 0.1, 0.995, 0.97, 0.99, 1.0, every=100, ms_per_step=18.5)),
        "a run that does not": tables(history(0, 0.1, 0.995, 0.93, every=100)),
        "a run that ends just below it": tables(history(0, 0.9896)),
    }
    several = {
        "settings with three seeds": sweep(slow=[40, 60, 80], fast=[20, 30, 40]),
        "runs that never get there": sweep(first=[40, None, 60], second=[20, 30, None], third=[None, None, None]),
        "a run of each setting": sweep(a=[40], b=[20]),
        "two runs of each setting": sweep(a=[60, 40], b=[20, 20]),
        "two runs, none gets there": sweep(a=[None, None], b=[None, None]),
        "several tasks": collected(tasks),
        "the first setting comes second in a task": collected(
            [*first, ("copy", "task=copy, a=1", 0, run(20)), ("copy", "task=copy", 0, run(40))]
        ),
        "a machine that was not equally free": collected(uneven),
    }
    cases = {name: list(Learn.say(found)) for name, found in one.items()}
    cases |= {name: common(found) for name, found in several.items()}
    assert not any("nan" in line for lines in cases.values() for line in lines)
    snapshot("learn", cases)


def test_means_are_geometric_and_compared_by_seed() -> None:
    lines = common(sweep(slow=[40, 60, 80], fast=[20, 30, 40]))
    mean, low, high = geometric_mean([40, 60, 80])
    assert f"{mean:.3g} steps (95 % interval {low:.3g} to {high:.3g}) and {mean / 50:.3g} s" in lines[0]
    assert "0.50 (0.50 to 0.50) times the steps and 0.50 (0.50 to 0.50) times the seconds" in lines[2]


def test_pairs_are_matched_by_seed_in_whatever_order_the_runs_come() -> None:
    slow, fast = {3: 40, 4: 80, 5: 60}, {5: 30, 3: 20, 4: 40, 9: 100}
    runs = [("sort", "a=1", seed, run(at)) for seed, at in slow.items()]
    found = collected([*runs, *(("sort", "a=2", seed, run(at)) for seed, at in fast.items())])
    reached = found["reached"]
    ratios = paired_ratios(reached[reached["setting"] == "a=2"], reached[reached["setting"] == "a=1"], "steps")
    assert dict(ratios) == pytest.approx({3: 0.5, 4: 0.5, 5: 0.5})
    assert "3 of 4 seeds" in common(found)[-1]


def test_steps_and_seconds_are_compared_each_for_itself() -> None:
    runs = [("sort", f"a={ms}", i, run(at, ms_per_step=ms)) for ms in (20, 40) for i, at in enumerate((40, 60, 50))]
    line = common(collected(runs))[-1]
    assert "1.00 (1.00 to 1.00) times the steps and 2.00 (2.00 to 2.00) times the seconds" in line


def test_a_run_that_was_repeated_counts_once_in_its_pair() -> None:
    runs = [("sort", "a=1", 0, run(40)), ("sort", "a=2", 0, run(20)), ("sort", "a=2", 0, run(80))]
    reached = collected(runs)["reached"]
    ratios = paired_ratios(reached[reached["setting"] == "a=2"], reached[reached["setting"] == "a=1"], "steps")
    assert dict(ratios) == pytest.approx({0: math.sqrt(20 * 80) / 40})


def test_settings_without_a_name_get_one() -> None:
    assert common(collected([("sort", "", seed, run(40)) for seed in (0, 1)]))[0].startswith("all runs:")
    both = collected([("sort", "task=sort", 0, run(40)), ("sort", "task=sort, a=1", 0, run(20))])
    assert [line.split(":")[0] for line in common(both)[:2]] == ["default", "a=1"]


def test_seconds_of_a_machine_that_was_hardly_uneven_are_not_doubted() -> None:
    assert (
        len(common(collected([("sort", "", seed, run(40, ms_per_step=ms)) for seed, ms in enumerate((20, 24))]))) == 1
    )
