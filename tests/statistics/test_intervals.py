import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from findings import student_p
from mhaprune.statistics.intervals import (
    difference_interval,
    mean_interval,
    moments,
    paired_interval,
    prediction_interval,
    prunable,
    share_interval,
    sign_flip_p,
    skewed_ends,
    student_interval,
    wilson_interval,
)

IntervalOf = Callable[..., tuple[float, float]]

MEAN_INTERVALS = {"mean": mean_interval, "share": share_interval, "difference": difference_interval}


@pytest.mark.parametrize("n", [2, 5, 40])
def test_of_symmetric_values_the_interval_of_the_mean_is_students(n: int) -> None:
    half = np.random.default_rng(n).exponential(size=n)
    values = 3 + np.append(half, -half)
    assert mean_interval(values) == pytest.approx(student_interval(values), rel=1e-5)


def test_halls_transform_of_the_t_at_either_end_is_the_quantile() -> None:
    """Hall 1992: T + a T²/3 + a² T³/27 + a/6, with the skewness that scipy finds."""
    for seed, sign in ((0, 1.0), (1, -1.0)):
        values = sign * np.random.default_rng(seed).lognormal(size=(60, 3))
        found = moments(values)
        expected = [values.mean(axis=0), stats.sem(values), stats.skew(values) / 60**0.5]
        np.testing.assert_allclose(found, expected)
        for quantile in (1.0, 1.96):
            low, high = skewed_ends(found, quantile)
            for end, wanted in ((low, quantile), (high, -quantile)):
                t, a = (found[0] - end) / found[1], found[2]
                np.testing.assert_allclose(t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6, wanted)
            further = (high - found[0]) > (found[0] - low)
            assert further.all() if sign > 0 else not further.any(), "the long end is that of the long tail"


@pytest.mark.parametrize("interval", MEAN_INTERVALS.values(), ids=MEAN_INTERVALS)
def test_the_mean_is_within_its_interval(interval: IntervalOf) -> None:
    draw = np.random.default_rng(3)
    for n in (2, 3, 20, 500):
        for share in (0.0, 0.5, 2 / n, 1 - 2 / n, 1.0):
            values = (draw.random(n) < share) * draw.uniform(0.5, 1.0, size=n)
            for these in (values, 1 - values):
                low, high = interval(these)
                assert not low > these.mean() + 1e-12  # NaN where there is too little to say
                assert not high < these.mean() - 1e-12
                assert np.isfinite([low, high]).all() or interval is mean_interval


def test_values_that_are_all_equal_have_a_width_only_where_others_are_possible() -> None:
    ones = np.ones(512)
    assert np.isnan(mean_interval(ones)).all(), "others may lose more"
    low, high = share_interval(ones)
    assert (low, high) == (pytest.approx(1 - 1.96 * 2**0.5 / 514, abs=1e-4), 1.0)
    assert difference_interval(0 * ones) == pytest.approx((low - 1, 1 - low), abs=1e-6)
    assert difference_interval(-ones) == (-1.0, pytest.approx(-low, abs=1e-6))


def test_the_interval_of_a_difference_is_near_tangos() -> None:
    for gained, lost in ((0, 0), (3, 0), (9, 2), (40, 37), (200, 40)):
        both = outcomes(gained, lost, 512)
        ours, exact = difference_interval(both[0] - both[1]), paired_interval(*both)
        assert ours == pytest.approx(exact, abs=0.005)


@pytest.mark.parametrize("values", [[], [0.5]])
def test_an_interval_of_a_mean_needs_two_values(values: list[float]) -> None:
    with pytest.raises(ValueError, match=rf"^interval of a mean over {len(values)} values?: at least 2 are needed$"):
        mean_interval(np.array(values))


def outcomes(gained: int, lost: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Of n examples so many right in the first only, and so many in the second only."""
    places = np.arange(n)
    return 1.0 * (places < gained), 1.0 * ((gained <= places) & (places < gained + lost))


def test_tango_gives_the_published_figures() -> None:
    """Tango 1998, table I: the score interval of 12 against 2 of 50 is .0611 to .3447, of 0 against 1 of 44 -.1181 to
    .0594."""
    assert paired_interval(*outcomes(12, 2, 50)) == pytest.approx((0.0611, 0.3447), abs=6e-5)
    assert paired_interval(*outcomes(0, 1, 44)) == pytest.approx((-0.1181, 0.0594), abs=6e-5)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (5, 0), (0, 5), (7, 3), (512, 0), (0, 512), (256, 256)])
def test_the_interval_of_pairs_turns_with_them_and_holds_the_difference(gained: int, lost: int) -> None:
    first, second = outcomes(gained, lost, 512)
    low, high = paired_interval(first, second)
    assert -1 <= low <= (gained - lost) / 512 <= high <= 1
    assert high - low > 0.01
    assert paired_interval(second, first) == pytest.approx((-high, -low), abs=1e-9)
    order = np.random.default_rng(0).permutation(512)
    assert paired_interval(first[order] > 0, second[order] > 0) == (low, high)


@pytest.mark.parametrize("n", [1, 2, 17, 400])
def test_wilson_is_scipys(n: int) -> None:
    for successes in {0, 1, n // 2, n}:
        values = np.arange(n) < successes
        expected = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
        assert wilson_interval(values) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("n", [3, 4, 31])
def test_students_interval_is_scipys(n: int) -> None:
    """Two seeds have none, and equal seeds one without a width."""
    for seeds in ([0.9], [0.9, 0.9]):
        assert all(map(math.isnan, [*student_interval(seeds), *prediction_interval(seeds)]))
    assert student_interval([0.5] * n) == (0.5, 0.5)
    assert (student_p([0.5] * n, 0.4), student_p([0.5] * n, 0.5)) == (0, 1)
    values = np.random.default_rng(n).normal(0.9, 0.01, size=n)
    expected = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert student_interval(values) == pytest.approx(expected, rel=1e-10)
    new = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=values.std(ddof=1) * (1 + 1 / n) ** 0.5)
    assert prediction_interval(values.tolist()) == pytest.approx(new, rel=1e-10)
    for bound in (0.89, 0.9, 0.91):
        expected_p = stats.ttest_1samp(values, bound, alternative="greater").pvalue
        assert student_p(values, bound) == pytest.approx(expected_p, rel=1e-6)
    assert student_interval(values.tolist()) == student_interval(pd.Series(values)) == student_interval(values)


def test_one_head_is_prunable_when_the_upper_end_is_below_the_tolerance() -> None:
    """A one-sided claim at 95 % goes with the interval of 90 %."""
    for mean in np.linspace(-0.1, 0.1, 21):
        for skewness in (-0.4, 0.0, 0.4):
            alone = np.array([[mean], [0.02], [skewness]])
            for confidence in (0.8, 0.95):
                _, high = skewed_ends(alone, stats.norm.ppf(confidence))
                assert prunable(alone, 0.05, confidence) == (high < 0.05)
            assert prunable(alone, 0.05) == prunable(alone, 0.05, 0.95)


@pytest.mark.parametrize("seed", range(2))
def test_several_heads_are_prunable_by_holm(seed: int) -> None:
    """The lowest p of N counts N times, the next N - 1 times, until the first that is too high."""
    draw = np.random.default_rng(seed)
    mean, stderr = draw.permutation(np.linspace(-0.06, 0.06, 12)), np.full(12, 0.02)
    p = stats.norm.cdf((mean - 0.03) / stderr)
    expected = np.zeros(12, dtype=bool)
    for place, n in enumerate(np.argsort(p)):
        if (12 - place) * p[n] >= 0.05:
            break
        expected[n] = True
    alone = p < 0.05
    assert 0 < expected.sum() < alone.sum(), "the heads must tell right from wrong"
    found = prunable(np.stack([mean, stderr, np.zeros(12)]), 0.03)
    np.testing.assert_array_equal(found, expected)


def test_a_head_of_which_nothing_is_known_is_not_prunable_and_no_claim_is_made_of_it() -> None:
    nan, p = math.nan, 0.02
    known = [0.05 + 0.02 * stats.norm.ppf(p), 0.02, 0.0]
    assert prunable(np.array([known]).T, 0.05).tolist() == [True]
    assert prunable(np.array([known, [0.06, 0.02, 0.0]]).T, 0.05).tolist() == [True, False]
    assert prunable(np.array([known, *2 * [[0.06, 0.02, 0.0]]]).T, 0.05).tolist() == [False] * 3
    unknown = [[nan, 0.02, 0.0], [0.0, nan, 0.0], [0.0, 0.02, nan]]
    assert prunable(np.array([known, *unknown]).T, 0.05).tolist() == [True, False, False, False]
    assert prunable(np.array([[0.0, 0.0, 0.0], [0.05, 0.0, 0.0]]).T, 0.05).tolist() == [True, False]
    assert prunable(np.zeros((3, 0)), 0.05).shape == (0,)


def test_sign_flips_are_those_of_scipy_and_of_few_differences() -> None:
    draw = np.random.default_rng(3)
    for shift in (0.0, 0.1, 0.3):
        values = draw.normal(shift, 1.0, 12)
        expected = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert sign_flip_p(values) == pytest.approx(expected.pvalue, abs=0.02)
    four = np.zeros(512)
    four[:4] = 1.0
    assert sign_flip_p(four) == pytest.approx(1 / 8, abs=0.02)
    assert sign_flip_p(1e-12 * four) == sign_flip_p(four)
    assert sign_flip_p(np.zeros(9)) == 1.0
