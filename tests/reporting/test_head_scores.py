"""The figure of all scores: a row per head, a column per scorer, colours by rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from mhaprune.reporting.head_scores import MOST_NUMBERS, head_scores
from mhaprune.reporting.plots import Plot, draw
from support.legible import check_legible


def drawn(scores: dict[str, Sequence[float]], width: int = 2) -> Plot:
    """The figure of heads in blocks of that width."""
    heads = pd.concat(
        pd.DataFrame({"scorer": name, "draw": 0, "site": "cross", "score": values}).assign(
            layer=np.arange(len(values)) // width, head=np.arange(len(values)) % width
        )
        for name, values in scores.items()
    )
    (plot,) = draw((head_scores,), {"heads": heads})
    return plot


def depths(axes: Axes) -> np.ndarray:
    return np.ma.filled(np.ma.asarray(axes.images[0].get_array(), dtype=float), np.nan)


def words(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_equal_ranks_have_equal_colours_whatever_the_scores() -> None:
    """The scores that a linear scale would leave in one colour are told apart."""
    axes, _ = drawn({"a": [2.0, 1e-5, 1e-3, 0.0], "b": [9.0, 7.0, 8.0, -3.0]}).figure.axes
    np.testing.assert_allclose(depths(axes), np.array([[1, 1 / 3, 2 / 3, 0]] * 2).T)
    assert words(axes)[::2] == ["2.00", "1e−5", "1e−3", "0"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cross 0", "cross 1"]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([2.0, np.nan, 1.0, 0.5], [1, np.nan, 0.5, 0]), ([0.3], [0.5]), ([0.3, 0.3], [0.5, 0.5]), ([np.nan], [np.nan])],
)
def test_a_head_without_a_score_is_grey_and_without_a_rank_half_way(scores: list[float], expected: list[float]) -> None:
    plot = drawn({"a": scores})
    np.testing.assert_array_equal(depths(plot.figure.axes[0])[:, 0], expected)
    assert words(plot.figure.axes[0]) == [f"{score:.2f}" for score in scores if not np.isnan(score)]
    assert ("Grey" in plot.caption) == bool(np.isnan(scores).any())


@pytest.mark.parametrize("width", [1, 12, 768])
@pytest.mark.parametrize("scorers", [1, MOST_NUMBERS + 1])
def test_768_heads_fit_a_page(width: int, scorers: int) -> None:
    figure = drawn({f"scorer_{i}": range(768) for i in range(scorers)}, width).figure
    assert (figure.get_size_inches() < 18).all()
    assert not any(axes.texts for axes in figure.axes), "numbers do not fit"


@pytest.mark.parametrize("scorers", [2, MOST_NUMBERS + 1])
def test_long_names_stay_in_the_figure(scorers: int) -> None:
    name = "a_scorer_with_a_name_of_sixty_letters_" + 22 * "x"
    check_legible(drawn({name: range(4)} | {f"scorer_{i}": range(4) for i in range(scorers - 1)}))
