from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from mhaprune.statistics.rankings import (
    RESAMPLES,
    kendall,
    kendall_interval,
    overlap,
    overlap_interval,
    spearman,
    spearman_interval,
)

AGREEMENTS = {
    "spearman": (spearman, spearman_interval),
    "kendall": (kendall, kendall_interval),
    "overlap": (partial(overlap, k=5), partial(overlap_interval, k=5)),
}
agreements = pytest.mark.parametrize(("statistic", "interval"), AGREEMENTS.values(), ids=AGREEMENTS)
Statistic = Callable[..., float]
IntervalOf = Callable[..., tuple[float, float]]


def scores(seed: int, n: int = 13) -> tuple[np.ndarray, np.ndarray]:
    """Two scorers of n heads that agree in part; in two of three seeds with ties, in one of these with many."""
    draw = np.random.default_rng(seed)
    first, second = draw.normal(size=(2, n))
    digits = (9, 0, 1)[seed % 3]
    return np.round(first, digits), np.round(first + second, digits)


@pytest.mark.parametrize("seed", range(12))
def test_agreement_is_scipys(seed: int) -> None:
    first, second = scores(seed)
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)
    assert kendall(first, second) == pytest.approx(stats.kendalltau(first, second).statistic)


@pytest.mark.parametrize("seed", range(12))
def test_overlap_is_that_of_what_one_shot_pruning_removes(seed: int) -> None:
    first, second = scores(seed)
    for k in range(1, 14):
        lowest = [set(sorted(range(13), key=list(values).__getitem__)[:k]) for values in (first, second)]
        assert overlap(first, second, k) == len(lowest[0] & lowest[1]) / k


@agreements
@pytest.mark.parametrize("seed", range(6))
def test_the_interval_is_that_of_the_plain_statistic_over_resampled_heads(
    statistic: Statistic, interval: IntervalOf, seed: int
) -> None:
    first, second = scores(seed)
    counts = np.random.default_rng(seed).multinomial(13, np.full(13, 1 / 13), size=RESAMPLES)
    values = [statistic(np.repeat(first, heads), np.repeat(second, heads)) for heads in counts]
    expected = np.nanquantile(values, [0.025, 0.975])
    assert interval(first, second, seed=seed) == pytest.approx(expected, rel=1e-12)


@agreements
def test_the_interval_is_close_to_scipys_paired_bootstrap(statistic: Statistic, interval: IntervalOf) -> None:
    pair = scores(0, n=40)
    expected = stats.bootstrap(
        pair, statistic, paired=True, vectorized=False, n_resamples=2000, method="percentile", rng=0
    ).confidence_interval
    assert interval(*pair) == pytest.approx((expected.low, expected.high), abs=0.04)


@agreements
def test_agreement_is_of_orders_and_of_heads_in_any_order(statistic: Statistic, interval: IntervalOf) -> None:
    first, second = scores(0)
    order = np.random.default_rng(6).permutation(13)
    assert statistic(first[order], second[order]) == statistic(first, second)
    assert statistic(np.exp(first), second**3) == statistic(first, second)
    assert interval(np.exp(first), second**3) == interval(first, second)
    assert statistic(first, first) == 1
    assert interval(first, first) == (1, 1)


@agreements
def test_agreement_goes_by_position_and_takes_series_integers_and_lists(
    statistic: Statistic, interval: IntervalOf
) -> None:
    first, second = np.array([5, 1, 4, 2, 3, 6, 0]), np.array([1, 2, 6, 5, 4, 3, 0])
    for other in (pd.Series(second, index=range(7, 0, -1)), second.tolist(), second.astype(np.float32)):
        assert statistic(pd.Series(first), other) == statistic(first, second)
        assert interval(pd.Series(first), other) == interval(first, second)


@pytest.mark.parametrize("name", ["spearman", "kendall"])
def test_a_constant_column_agrees_with_nothing(name: str) -> None:
    statistic, interval = AGREEMENTS[name]
    varied = np.arange(6.0)
    for pair in ((varied, np.ones(6)), (np.ones(6), varied), (np.ones(6), np.ones(6)), ([1.0], [2.0]), ([], [])):
        assert math.isnan(statistic(*pair))
        assert all(map(math.isnan, interval(*pair)))
    assert statistic(varied, -varied) == -1


@pytest.mark.parametrize("name", ["spearman", "kendall"])
def test_resamples_without_a_correlation_are_left_out(name: str) -> None:
    """Of three heads one resample in nine has only one head in it."""
    _, interval = AGREEMENTS[name]
    assert interval([1, 2, 3], [1, 2, 3]) == (1, 1)


def test_no_heads_have_no_overlap_and_all_heads_have_a_full_one() -> None:
    first, second = scores(0)
    assert math.isnan(overlap(first, second, 0))
    assert all(map(math.isnan, overlap_interval(first, second, 0)))
    assert overlap(first, second, 13) == 1
    assert overlap_interval(first, second, 13) == (1, 1)


@pytest.mark.parametrize("k", [-1, 14])
def test_overlap_names_the_k_that_is_out_of_range(k: int) -> None:
    for function in (overlap, overlap_interval):
        with pytest.raises(ValueError, match=rf"^overlap k={k}: must be from 0 to 13$"):
            function(*scores(0), k)


@pytest.mark.parametrize("name", ["spearman", "kendall"])
def test_the_interval_over_heads_covers_the_truth_about_as_often_as_it_says(name: str) -> None:
    _, interval = AGREEMENTS[name]
    draw, rho = np.random.default_rng(7), 0.6
    truth = {"spearman": 6 / math.pi * math.asin(rho / 2), "kendall": 2 / math.pi * math.asin(rho)}[name]
    covered = []
    for _ in range(200):
        first, noise = draw.normal(size=(2, 40))
        low, high = interval(first, rho * first + (1 - rho**2) ** 0.5 * noise)
        covered.append(low <= truth <= high)
    assert 0.88 <= np.mean(covered) <= 0.99
