from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from mhaprune.statistics import bootstrap_interval, spearman, wilson_interval


def test_the_bootstrap_is_close_to_the_normal_interval_for_many_examples() -> None:
    values = np.random.default_rng(0).normal(3, 2, size=2000)
    low, high = bootstrap_interval(values)
    half = 1.96 * values.std() / 2000**0.5
    assert low == pytest.approx(values.mean() - half, abs=0.015)
    assert high == pytest.approx(values.mean() + half, abs=0.015)


def test_the_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    covered = [low <= 1.0 <= high for low, high in (bootstrap_interval(draw.exponential(size=200)) for _ in range(200))]
    assert 0.88 <= np.mean(covered) <= 0.99


def test_wilson_gives_the_published_figures() -> None:
    """Newcombe 1998, table I: 81 of 263 is .2553 to .3662, 15 of 148 is .0624 to .1605, 0 of 20 is .0000 to .1611."""
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        values = np.array([1.0] * successes + [0.0] * (n - successes))
        assert wilson_interval(values) == pytest.approx((low, high), abs=6e-5)


def test_spearman_is_the_correlation_of_ranks() -> None:
    first, second = pd.Series([1.0, 2, 3, 4, 5], index=[9, 8, 7, 6, 5]), pd.Series([1.0, 4, 9, 25, 16])
    assert spearman(first, second) == pytest.approx(0.9)
    assert np.isnan(spearman(first, pd.Series([1.0] * 5)))
