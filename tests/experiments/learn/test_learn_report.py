"""The report of `experiment=learn`: what one run says and draws, and what many do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from learnt import collected, history, run, sweep, tables
from mhaprune.experiments.learn.report import paired_ratios
from mhaprune.experiments.learn.study import Learn
from mhaprune.reporting.plots import draw
from mhaprune.statistics.intervals import geometric_mean
from support.legible import check_legible
from support.sizes import slow


def test_what_is_said(snapshot: Any) -> None:
    tasks = [
        (task, f"task={task}, rate={name}", seed, run(at * factor))
        for task, factor in (("sort", 1), ("copy", 2))
        for name, at in (("slow", 40), ("fast", 10 * factor))
        for seed in (0, 1, 2)
    ]
    one = {
        "a run that stays at its target": tables(history(0, 0.1, 0.995, 0.97, 0.99, 1.0, every=100, ms_per_step=18.5)),
        "a run that does not": tables(history(0, 0.1, 0.995, 0.93, every=100)),
        "a run that ends just below it": tables(history(0, 0.9896)),
    }
    several = {
        "settings with three seeds": sweep(slow=[40, 60, 80], fast=[20, 30, 40]),
        "runs that never get there": sweep(first=[40, None, 60], second=[20, 30, None], third=[None, None, None]),
        "two runs of each setting": sweep(a=[60, 40], b=[20, 20]),
        "several tasks": collected(tasks),
    }
    cases = {name: list(Learn.say(found)) for name, found in one.items()}
    cases |= {name: list(Learn.say_in_common(found)) for name, found in several.items()}
    assert not any("nan" in line for lines in cases.values() for line in lines)
    snapshot("learn", cases)


def test_pairs_are_matched_by_seed_and_each_time_is_compared_for_itself() -> None:
    """In whatever order the runs come; the geometric mean of runs that were repeated counts."""
    slow, fast = {3: 40, 4: 80, 5: 60}, {5: 30, 3: 20, 4: 40, 9: 100}
    runs = [("sort", "a=1", seed, run(at)) for seed, at in slow.items()]
    runs += [("sort", "a=2", seed, run(at, ms_per_step=40)) for seed, at in fast.items()]
    found = collected([*runs, ("sort", "a=2", 3, run(80, ms_per_step=40)), ("sort", "a=2", 5, run(None))])
    first, other = (found["reached"].query("setting == @name") for name in ("a=1", "a=2"))
    assert dict(paired_ratios(other, first, "steps")) == pytest.approx({3: math.sqrt(20 * 80) / 40, 4: 0.5})
    assert dict(paired_ratios(other, first, "seconds")) == pytest.approx({3: math.sqrt(20 * 80) / 20, 4: 1})


def circles(axes: Axes, still_open: bool) -> list[tuple[float, float]]:
    """The places of the circles that are open, or of those that are not."""
    lines = [line for line in axes.get_lines() if line.get_marker() == "o"]
    own = [line for line in lines if (to_rgba(line.get_markerfacecolor()) == to_rgba("white")) == still_open]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in own]


def test_times_stand_in_the_rows_of_their_settings() -> None:
    """A run that does not get there is open; a mean with its interval is drawn only where all runs get there."""
    found = sweep(zeta=[40, 60, 80], alpha=[20, None, None], mid=[None, None, None])
    [plot] = draw(Learn.figures_over_runs, found)
    reached, rows = found["reached"], ["rate=zeta", "rate=alpha", "rate=mid"]
    assert [label.get_text() for label in plot.figure.axes[0].get_yticklabels()] == rows
    for axes, name, unit in zip(plot.figure.axes, ("steps", "seconds"), (1, 0.02), strict=True):
        for there in (True, False):
            own = reached[reached["reached"] == there]
            expected = [(time, rows.index(row)) for time, row in zip(own[name], own["setting"], strict=True)]
            assert [(time, round(row)) for time, row in circles(axes, still_open=not there)] == expected
        assert axes.get_xlim()[0] < reached[name].min() < reached[name].max() < axes.get_xlim()[1]
        [segment] = axes.collections[0].get_segments()
        np.testing.assert_allclose(segment[:, 0], unit * np.array(geometric_mean([40, 60, 80])[1:]))


@pytest.mark.parametrize("settings", [1, 12, *slow(2, 7, 30)])
def test_few_and_many_settings_can_be_read(settings: int) -> None:
    names = [f"training.learning_rate={0.001 * i:g}, training.label_smoothing={0.01 * i:g}" for i in range(settings)]
    runs = [
        (task, name, seed, run(10 * (i + 2 + seed), ms_per_step=20 + i, steps=300) if i < 25 else run(None))
        for task in ("sort", "copy")[: 1 + (settings < 10)]
        for i, name in enumerate(names)
        for seed in range(3)
    ]
    [plot] = draw(Learn.figures_over_runs, collected(runs))
    check_legible(plot)
    shown = [label.get_text().replace("\n", " ") for label in plot.figure.axes[0].get_yticklabels()]
    assert shown == names
