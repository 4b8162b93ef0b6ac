"""The figure of all scores: maps for a few scorers, one matrix for many, colours by rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from mhaprune.reporting.head_scores import MOST_PANELS, head_scores
from mhaprune.reporting.plots import Plot, draw
from support.legible import check_legible


def table(scores: dict[str, Sequence[float]], width: int = 2) -> pd.DataFrame:
    """Heads in blocks of that width."""
    return pd.concat(
        pd.DataFrame(
            [
                {"scorer": name, "draw": 0, "site": "cross", "layer": i // width, "head": i % width, "score": score}
                for i, score in enumerate(values)
            ]
        )
        for name, values in scores.items()
    )


def drawn(heads: pd.DataFrame) -> Plot:
    (plot,) = draw((head_scores,), {"heads": heads})
    return plot


def depths(axes: Axes) -> np.ndarray:
    return np.ma.filled(np.ma.asarray(axes.images[0].get_array(), dtype=float), np.nan)


def words(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def names(count: int) -> list[str]:
    return [f"scorer_{i}" for i in range(count)]


def test_equal_ranks_have_equal_colours_whatever_the_scores() -> None:
    """The scores that a linear scale would leave in one colour are told apart."""
    first, second, _ = drawn(table({"a": [2.0, 1e-5, 1e-3, 0.0], "b": [9.0, 7.0, 8.0, -3.0]})).figure.axes
    np.testing.assert_allclose(depths(first), [[1, 1 / 3], [2 / 3, 0]])
    np.testing.assert_array_equal(depths(first), depths(second))
    assert words(first) == ["2.00", "1e−5", "1e−3", "0"]


def test_a_head_without_a_score_has_neither_rank_nor_number() -> None:
    first, *_ = drawn(table({"a": [2.0, np.nan, 1.0, 0.5]})).figure.axes
    np.testing.assert_array_equal(depths(first), [[1, np.nan], [0.5, 0]])
    assert words(first) == ["2.00", "1.00", "0.50"]


@pytest.mark.parametrize("scores", [[0.3], [0.3, 0.3], [np.nan, np.nan]])
def test_heads_that_cannot_be_ranked_are_drawn(scores: list[float]) -> None:
    """One head, equal ones, or no score at all: half way, or grey."""
    first, *_ = drawn(table({"a": scores})).figure.axes
    assert set(depths(first)[~np.isnan(depths(first))]) <= {0.5}
    assert words(first) == [f"{score:.2f}" for score in scores if not np.isnan(score)] or words(first) == ["no scores"]


def test_many_scorers_are_one_matrix() -> None:
    scorers = names(MOST_PANELS + 2)
    figure = drawn(table(dict.fromkeys(scorers, range(8)), width=4)).figure
    axes, _ = figure.axes
    assert depths(axes).shape == (8, len(scorers))
    assert [label.get_text() for label in axes.get_xticklabels()] == scorers
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cross 0", "cross 1"]


@pytest.mark.parametrize("scores", [[1.0, np.nan, 3.0, 2.0], [np.nan] * 4])
def test_a_matrix_has_a_grey_row_for_a_head_without_any_score(scores: list[float]) -> None:
    axes, _ = drawn(table(dict.fromkeys(names(MOST_PANELS + 1), scores))).figure.axes
    assert np.array_equal(np.isnan(depths(axes)).all(axis=1), np.isnan(scores))


@pytest.mark.parametrize("width", [1, 12, 64, 768])
@pytest.mark.parametrize("scorers", [1, 3, MOST_PANELS + 1])
def test_768_heads_fit_a_page(width: int, scorers: int) -> None:
    figure = drawn(table(dict.fromkeys(names(scorers), range(768)), width=width)).figure
    assert (figure.get_size_inches() < 18).all()
    assert not any(axes.texts for axes in figure.axes), "numbers do not fit"


@pytest.mark.parametrize("scorers", [2, MOST_PANELS + 1])
def test_long_names_stay_in_the_figure(scorers: int) -> None:
    name = "a_scorer_with_a_name_of_sixty_letters_" + 22 * "x"
    check_legible(drawn(table(dict.fromkeys([name, *names(scorers - 1)], range(4)))))
