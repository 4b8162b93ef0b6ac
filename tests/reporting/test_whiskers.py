"""Intervals that are far wider than what they belong to."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mhaprune.reporting.shared_figures import mean_over_runs
from mhaprune.reporting.whiskers import Whisker, arrows_beyond, room_for
from mhaprune.statistics.intervals import student_interval


def arrows(axes: Axes) -> list[tuple[str, float, float]]:
    """The mark and the place of each."""
    found = [line for line in axes.get_lines() if line.get_marker() in list("<>^v")]
    return [(str(line.get_marker()), *(float(np.asarray(ends).item()) for ends in line.get_data())) for line in found]


@pytest.mark.parametrize(
    ("values", "ends", "low", "high"),
    [
        ([1.0, 3.0], [], 1.0, 3.0),
        ([1.0, 3.0], [0.5, 4.0], 0.5, 4.0),
        ([1.0, 3.0], [-50.0, 60.0], -1.0, 5.0),
        ([1.0, 3.0], [math.nan], 1.0, 3.0),
        ([0.0], [], 0.0, 0.0),
    ],
)
def test_there_is_room_for_all_values_and_for_ends_that_are_not_far(
    values: list[float], ends: list[float], low: float, high: float
) -> None:
    left, right = room_for(pd.Series(values), ends)
    margin = 0.06 * (high - low or 1.0)
    assert (left, right) == pytest.approx((low - margin, high + margin))


@pytest.mark.parametrize("vertical", [False, True])
def test_an_arrow_stands_at_the_edge_that_an_interval_crosses(vertical: bool) -> None:
    axes = Figure().add_subplot()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    whiskers = [
        Whisker(1, 2, 8, "red"),
        Whisker(2, 2, 80, "red"),
        Whisker(3, -9, 80, "red"),
        Whisker(4, 20, 30, "red"),
        Whisker(5, math.nan, math.nan, "red"),
    ]
    assert arrows_beyond(axes, whiskers, vertical=vertical)
    wanted = [("^", 2, 10), ("v", 3, 0), ("^", 3, 10)] if vertical else [(">", 10, 2), ("<", 0, 3), (">", 10, 3)]
    assert arrows(axes) == wanted, "what lies beyond as a whole has none"
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 10), (0, 10))
    assert not arrows_beyond(axes, whiskers[:1], vertical=vertical)


def test_the_interval_of_three_runs_does_not_squeeze_the_marks_of_all_others() -> None:
    values = {"calm": [1.0, 1.1, 1.2], "wild": [0.0, 0.0, 4.0]}
    rows = [{"label": f"seed={i}", "row": name, "x": x} for name, xs in values.items() for i, x in enumerate(xs)]
    axes = Figure().add_subplot()
    mean_over_runs(axes, pd.DataFrame(rows), "row", "x", ["calm", "wild"])
    low, high = axes.get_xlim()
    assert low < student_interval(values["wild"])[0]
    assert student_interval(values["wild"])[1] < high < 9
    assert not arrows(axes)
    mean_over_runs(axes, pd.DataFrame(rows), "row", "x", ["calm", "wild"], (-0.5, 1.5))
    assert axes.get_xlim() == (-0.5, 1.5)
