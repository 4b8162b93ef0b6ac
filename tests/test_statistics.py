from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from mhaprune.statistics import (
    RESAMPLES,
    area,
    area_weights,
    bernstein_bound,
    bootstrap_interval,
    geometric_mean,
    kendall,
    kendall_interval,
    overlap,
    overlap_interval,
    prunable,
    sign_flip_p,
    spearman,
    spearman_interval,
    student_interval,
    wilson_interval,
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


def test_bootstraps_of_one_seed_are_paired() -> None:
    """What is always better by the same amount is surely better, however uncertain both are."""
    values = np.random.default_rng(2).normal(size=50)
    low, high = bootstrap_interval(values, seed=7)
    assert bootstrap_interval(values + 1, seed=7) == pytest.approx((low + 1, high + 1))
    assert bootstrap_interval(values, seed=8) != (low, high)


@pytest.mark.parametrize("values", [[], [0.5]])
def test_a_bootstrap_needs_two_values(values: list[float]) -> None:
    with pytest.raises(ValueError, match=rf"^bootstrap interval over {len(values)} values?: at least 2 are needed$"):
        bootstrap_interval(np.array(values))


def test_wilson_gives_the_published_figures() -> None:
    """Newcombe 1998, table I: 81 of 263 is .2553 to .3662, 15 of 148 is .0624 to .1605, 0 of 20 is .0000 to .1611."""
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        values = np.array([1.0] * successes + [0.0] * (n - successes))
        assert wilson_interval(values) == pytest.approx((low, high), abs=6e-5)


@pytest.mark.parametrize("n", [1, 2, 17, 400])
def test_wilson_is_scipys(n: int) -> None:
    for successes in {0, 1, n // 2, n}:
        values = np.arange(n) < successes
        expected = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
        assert wilson_interval(values) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 30, 31])
def test_students_interval_is_scipys(n: int) -> None:
    values = np.random.default_rng(n).normal(0.9, 0.01, size=n)
    expected = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert student_interval(values) == pytest.approx(expected, rel=1e-10)
    assert student_interval(values.tolist()) == student_interval(pd.Series(values)) == student_interval(values)


def test_one_seed_has_no_interval_and_equal_seeds_have_no_width() -> None:
    assert all(map(math.isnan, student_interval([0.9])))
    assert student_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


def test_a_geometric_mean_has_the_interval_of_its_logarithms() -> None:
    times = np.array([300.0, 400.0, 1200.0])
    mean, low, high = geometric_mean(times)
    assert mean == pytest.approx(stats.gmean(times))
    assert (math.log(low), math.log(high)) == pytest.approx(student_interval(np.log(times)))
    assert geometric_mean(1 / times) == pytest.approx((1 / mean, 1 / high, 1 / low)), "a ratio and its inverse agree"
    mean, *ends = geometric_mean([7.4])
    assert mean == pytest.approx(7.4)
    assert all(map(math.isnan, ends))


def test_students_interval_covers_three_seeds_where_the_bootstrap_does_not() -> None:
    draws = np.random.default_rng(3).normal(size=(400, 3))
    covered = {
        interval: np.mean([low <= 0 <= high for low, high in map(interval, draws)])
        for interval in (student_interval, bootstrap_interval)
    }
    assert covered[student_interval] >= 0.92
    assert covered[bootstrap_interval] <= 0.85


def test_the_bernstein_bound_is_its_formula_and_elementwise() -> None:
    variances, ranges, counts = np.array([0.0, 0.04, 2.0]), np.array([1.0, 1.0, 8.0]), np.array([16, 64, 1000])
    bounds = bernstein_bound(variances, ranges, counts, confidence=0.9)
    for bound, variance, value_range, n in zip(bounds, variances, ranges, counts, strict=True):
        log = math.log(3 / 0.1)
        assert bound == pytest.approx((2 * variance * log / n) ** 0.5 + 3 * value_range * log / n)
        assert bound == bernstein_bound(variance, value_range, n, 0.9)
    assert bernstein_bound(0.25, 1.0, 10) == bernstein_bound(0.25, 1.0, 10, confidence=0.95)


def test_the_bernstein_bound_has_the_unit_of_the_values() -> None:
    values = np.random.default_rng(4).uniform(size=40)
    assert bernstein_bound((7 * values).var(), 7.0, 40) == pytest.approx(7 * bernstein_bound(values.var(), 1.0, 40))


@pytest.mark.parametrize("n", [5, 50, 500])
def test_the_bernstein_bound_covers_the_truth_at_least_as_often_as_it_says(n: int) -> None:
    draws = np.random.default_rng(5).beta(0.1, 0.9, size=(300, n))
    error = abs(draws.mean(axis=1) - 0.1)
    assert np.mean(error <= bernstein_bound(draws.var(axis=1), 1.0, n)) >= 0.95


def test_a_head_is_prunable_when_the_loss_surely_rises_by_less_than_the_tolerance() -> None:
    mean, stderr, tolerance = np.linspace(-0.1, 0.1, 21), np.full(21, 0.02), 0.05
    for confidence in (0.5, 0.8, 0.95):
        expected = stats.norm.ppf(confidence, loc=mean, scale=stderr) < tolerance
        assert expected.any()
        assert not expected.all()
        np.testing.assert_array_equal(prunable(mean, stderr, tolerance, confidence), expected)
    np.testing.assert_array_equal(prunable(mean, stderr, tolerance), prunable(mean, stderr, tolerance, 0.95))
    assert prunable(np.zeros(2), np.array([0.0, math.nan]), tolerance).tolist() == [True, False]


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


def test_the_area_under_known_curves() -> None:
    removed = [0, 1, 4, 10]
    assert area(removed, [0.7] * 4) == pytest.approx(0.7)
    assert area(removed, [1 - n / 10 for n in removed]) == pytest.approx(0.5)
    assert area([0, 10], [1, 0]) == pytest.approx(0.5)
    assert area([0, 9, 10], [1, 1, 0]) == pytest.approx(0.95)
    assert area([3, 4], [0.2, 0.4]) == pytest.approx(0.3)


@pytest.mark.parametrize("seed", range(5))
def test_the_area_is_scipys_and_within_the_accuracies(seed: int) -> None:
    draw = np.random.default_rng(seed)
    removed, accuracy = np.sort(draw.permutation(72)[:9]), draw.uniform(size=9)
    assert area(removed, accuracy) == pytest.approx(np.trapezoid(accuracy, removed) / (removed[-1] - removed[0]))
    assert accuracy.min() < area(removed, accuracy) < accuracy.max()


def test_the_area_of_the_mean_curve_is_the_mean_area_of_the_examples() -> None:
    removed, correct = [0, 2, 3, 8], np.random.default_rng(8).integers(2, size=(4, 50))
    areas = area_weights(removed) @ correct
    assert area(removed, correct.mean(axis=1)) == pytest.approx(areas.mean())
    assert area_weights(removed).sum() == pytest.approx(1)


@pytest.mark.parametrize("removed", [[], [3], [0, 4, 4], [0, 5, 2]])
def test_a_curve_has_two_points_or_more_and_ascends(removed: list[int]) -> None:
    for function in (area_weights, partial(area, accuracy_P=removed)):
        with pytest.raises(ValueError, match=r"^removed=\[.*\]: must be two or more points, ascending$"):
            function(removed)


def test_sign_flips_are_those_of_scipy_and_of_few_differences() -> None:
    draw = np.random.default_rng(3)
    for shift in (0.0, 0.1, 0.3):
        values = draw.normal(shift, 1.0, 60)
        expected = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=9999, rng=draw)
        assert sign_flip_p(values) == pytest.approx(expected.pvalue, abs=0.02)
    four = np.zeros(512)
    four[:4] = 1.0
    assert sign_flip_p(four) == pytest.approx(1 / 8, abs=0.02)
    assert sign_flip_p(np.zeros(9)) == 1.0
