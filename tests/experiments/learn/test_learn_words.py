"""What `experiment=learn` says of one run and of many."""

from __future__ import annotations

import math

import pytest

from learnt import collected, history, run, sweep, tables
from mhaprune.experiments.learn.study import Learn
from mhaprune.experiments.learn.words import paired_ratios
from mhaprune.statistics.intervals import geometric_mean
from mhaprune.tables import Tables


def common(found: Tables) -> list[str]:
    return list(Learn.say_in_common(found))


def test_a_run_says_from_where_on_it_stays_at_its_target() -> None:
    lines = list(Learn.say(tables(history(0, 0.1, 0.995, 0.97, 0.99, 1.0, every=100, ms_per_step=18.5))))
    assert lines[:3] == [
        "Exact match on the valid split stays at 0.99 or more from step 400 on, after 7.4 s of training.",
        "The evaluation before that, at step 300, found 0.97.",
        "The whole training took 9.25 s: 500 steps of 18.5 ms, for a model of 212,000 parameters.",
    ]


def test_a_run_that_does_not_stay_there_says_so() -> None:
    lines = list(Learn.say(tables(history(0, 0.1, 0.995, 0.93, every=100))))
    assert lines[:2] == [
        "Exact match never stays at 0.99: it ends at 0.93 after 300 steps, so the time to 0.99 is not known.",
        "The best evaluation found 0.995.",
    ]
    [line, *_] = Learn.say(tables(history(0, 0.9896)))
    assert "ends at 0.9896" in line, "not 0.99, which is the target"


def test_settings_are_counted_and_compared_with_the_first_by_seed() -> None:
    lines = common(sweep(slow=[40, 60, 80], fast=[20, 30, 40]))
    mean, low, high = geometric_mean([40, 60, 80])
    assert lines[0] == (
        f"rate=slow: 3 of 3 runs reach 0.99, after {mean:.3g} steps (95 % interval {low:.3g} to {high:.3g}) and"
        f" {mean / 50:.3g} s ({low / 50:.3g} to {high / 50:.3g}), geometric means."
    )
    assert lines[1].startswith("rate=fast: 3 of 3 runs reach 0.99, after 28.8 steps")
    assert lines[2:] == [
        "rate=fast needs 0.50 (0.50 to 0.50) times the steps and 0.50 (0.50 to 0.50) times the seconds of rate=slow"
        " (geometric means and 95 % intervals over 3 seeds)."
    ]


def test_pairs_are_matched_by_seed_in_whatever_order_the_runs_come() -> None:
    slow, fast = {3: 40, 4: 80, 5: 60}, {5: 30, 3: 20, 4: 40, 9: 100}
    runs = [("sort", "a=1", seed, run(at)) for seed, at in slow.items()]
    found = collected([*runs, *(("sort", "a=2", seed, run(at)) for seed, at in fast.items())])
    reached = found["reached"]
    ratios = paired_ratios(reached[reached["setting"] == "a=2"], reached[reached["setting"] == "a=1"], "steps")
    assert dict(ratios) == pytest.approx({3: 0.5, 4: 0.5, 5: 0.5})
    assert "needs 0.50 (0.50 to 0.50) times the steps" in common(found)[-1]
    assert common(found)[-1].endswith("intervals over the 3 of 4 seeds that reach the target with both).")


def test_steps_and_seconds_are_compared_each_for_itself() -> None:
    runs = [("sort", f"a={ms}", i, run(at, ms_per_step=ms)) for ms in (20, 40) for i, at in enumerate((40, 60, 50))]
    assert (
        "needs 1.00 (1.00 to 1.00) times the steps and 2.00 (2.00 to 2.00) times the seconds of a=20"
        in common(collected(runs))[-1]
    )


def test_a_run_that_never_gets_there_is_counted_and_no_mean_is_claimed() -> None:
    lines = common(sweep(first=[40, None, 60], second=[20, 30, None], third=[None, None, None]))
    assert lines == [
        "rate=first: 2 of 3 runs reach 0.99, after 40 and 60 steps. The rest does not within 100 steps, so the mean is"
        " not known. At the end they are at 0.98 on average (0.88 to 1.00).",
        "rate=second: 2 of 3 runs reach 0.99, after 20 and 30 steps. The rest does not within 100 steps, so the mean is"
        " not known. At the end they are at 0.98 on average (0.88 to 1.00).",
        "rate=third: 0 of 3 runs reach 0.99 within 100 steps. At the end they are at 0.93 on average (0.93 to 0.93).",
        "rate=second needs 0.50 times the steps and 0.50 times the seconds of rate=first (seed 0 alone, so there is no"
        " interval).",
        "rate=third is not compared with rate=first: no seed reaches the target with both.",
    ]


def test_one_run_of_a_setting_has_no_interval() -> None:
    lines = common(sweep(a=[40], b=[20]))
    assert lines[0] == "rate=a: 1 of 1 runs reaches 0.99, after 40 steps, and 0.8 s."
    assert "seed 0 alone, so there is no interval" in lines[-1]
    assert not any("nan" in line for line in lines)


def test_two_runs_of_a_setting_have_their_values_and_no_interval() -> None:
    lines = common(sweep(a=[60, 40], b=[20, 20]))
    assert lines[0] == "rate=a: 2 of 2 runs reach 0.99, after 40 and 60 steps, and 0.8 and 1.2 s."
    assert "0.33 and 0.50 times the steps" in lines[-1]
    assert "interval)" in lines[-1]
    (never, _) = common(sweep(a=[None, None], b=[None, None]))[:2]
    assert never.endswith("At the end they are at 0.93 and 0.93.")
    assert not any(word in line for line in lines for word in ("nan", " to "))


def test_a_run_that_was_repeated_counts_once_in_its_pair() -> None:
    runs = [("sort", "a=1", 0, run(40)), ("sort", "a=2", 0, run(20)), ("sort", "a=2", 0, run(80))]
    reached = collected(runs)["reached"]
    ratios = paired_ratios(reached[reached["setting"] == "a=2"], reached[reached["setting"] == "a=1"], "steps")
    assert dict(ratios) == pytest.approx({0: math.sqrt(20 * 80) / 40})


def test_every_task_is_compared_for_itself() -> None:
    runs = [
        (task, f"task={task}, rate={name}", seed, run(at * factor))
        for task, factor in (("sort", 1), ("copy", 2))
        for name, at in (("slow", 40), ("fast", 10 * factor))
        for seed in (0, 1, 2)
    ]
    lines = common(collected(runs))
    assert [line.split(" runs")[0].split(" times")[0] for line in lines] == [
        "On sort: rate=slow: 3 of 3",
        "On sort: rate=fast: 3 of 3",
        "On sort: rate=fast needs 0.25 (0.25 to 0.25)",
        "On copy: rate=slow: 3 of 3",
        "On copy: rate=fast: 3 of 3",
        "On copy: rate=fast needs 0.50 (0.50 to 0.50)",
    ]


def test_the_setting_that_others_are_compared_with_is_the_same_for_every_task() -> None:
    """Also where the runs of another one come first, as they do when sweeps are put together."""
    first = [("sort", "task=sort", 0, run(40)), ("sort", "task=sort, a=1", 0, run(20))]
    lines = common(collected([*first, ("copy", "task=copy, a=1", 0, run(20)), ("copy", "task=copy", 0, run(40))]))
    assert [line.split(":")[1].split(" needs")[0] for line in lines] == [" default", " a=1", " a=1"] * 2


def test_settings_without_a_name_get_one() -> None:
    assert common(collected([("sort", "", seed, run(40)) for seed in (0, 1)]))[0].startswith("all runs: 2 of 2")
    both = collected([("sort", "task=sort", 0, run(40)), ("sort", "task=sort, a=1", 0, run(20))])
    assert [line.split(":")[0] for line in common(both)[:2]] == ["default", "a=1"]


def test_seconds_of_a_machine_that_was_not_equally_free_are_doubted() -> None:
    lines = {
        slow: common(collected([("sort", "", seed, run(40, ms_per_step=ms)) for seed, ms in enumerate((20, slow))]))
        for slow in (24, 30)
    }
    assert len(lines[24]) == 1
    assert lines[30][1] == (
        "A step took from 20 to 30 ms in runs of one setting, so the machine was not equally free in all of them: trust"
        " the steps more than the seconds."
    )
