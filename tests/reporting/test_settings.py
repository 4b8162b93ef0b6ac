"""Settings as axes and colours: numbers in their order, in one ramp; all else as it comes."""

from __future__ import annotations

from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from mhaprune.reporting.plots import COLOURS, STYLE
from mhaprune.reporting.settings import Setting, by_use, setting


def lightness(found: Setting) -> np.ndarray:
    return np.array([to_rgb(style["color"]) for style in found.styles.values()]) @ (0.2126, 0.7152, 0.0722)


@pytest.mark.parametrize(
    ("values", "order"),
    [
        (["4", "1", "2"], ["1", "2", "4"]),
        (["1e-3", "0.1", "1e-2"], ["1e-3", "1e-2", "0.1"]),
        (["sort", "copy"], ["sort", "copy"]),
        (["8", "null", "4"], ["8", "null", "4"]),
        (["nan", "1"], ["nan", "1"]),
    ],
)
def test_numbers_stand_in_their_order_and_anything_else_as_it_comes(values: list[str], order: list[str]) -> None:
    assert list(setting("x", [*values, *values]).values) == order


def test_numbers_have_one_ramp_and_words_the_usual_colours() -> None:
    ramp = lightness(setting("num_heads", ["16", "8", "1", "2", "4"]))
    assert (np.diff(ramp) < 0).all(), "the more, the darker"
    assert ramp[0] < 0.8, "still seen on white"
    words = setting("task", ["sort", "copy"])
    assert [style["color"] for style in words.styles.values()] == list(COLOURS[:2])


def test_a_figure_uses_numbers_before_words_and_many_values_before_few() -> None:
    few, many = setting("few", "12"), setting("many", "123")
    words, more = setting("words", "ab"), setting("more", "abcd")
    assert by_use([words, few, more, many]) == [many, few, more, words]


def test_names_of_ticks_do_not_touch() -> None:
    found = setting("learning_rate", [f"{i}.25" for i in range(60)])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.4, 2.6))
        axes = figure.add_subplot()
        found.draw_axis(axes)
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axes.get_xticklabels() if text.get_text()]
    assert 3 <= len(boxes) < 20
    assert all(right.x0 > left.x1 for left, right in pairwise(boxes))
