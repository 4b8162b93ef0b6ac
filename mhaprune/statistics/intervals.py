"""Confidence intervals and tests.

Dimensions: E = examples, N = heads, S = seeds.

Sums use einsum, not `@`: the threads of NumPy's BLAS ignore num_threads.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95
QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
ONE_SIDED = 2 * CONFIDENCE - 1
"""The confidence of a two-sided interval each end of which, taken alone, holds at `CONFIDENCE`."""
SIGN_FLIPS = 4999
MOST_SKEWED = 0.75
"""The largest skewness of a mean that gets an interval. A mean with a larger skewness depends on two examples or fewer
(or on about eight exponentially distributed examples), and up to 80 of 100 intervals would be wrong."""
LEAST_RUNS = 3
"""The smallest number of runs for an interval over runs."""


def mean_interval(values_E: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of a mean over examples, corrected for skewness: see `skewed_ends`. Use it for losses.

    It is NaN if the mean depends on too few examples. Raises ValueError for fewer than two values.
    """
    n = len(values_E)
    if n < 2:
        raise ValueError(f"interval of a mean over {n} value{'s' * (n != 1)}: at least 2 are needed")
    low, high = skewed_ends(moments(values_E[:, None]), _student_quantile(n - 1, confidence))
    return float(low[0]), float(high[0])


def share_interval(values_E: np.ndarray) -> tuple[float, float]:
    """Return the interval of a mean over examples whose values are shares, between 0 and 1.

    If enough examples differ, it is `mean_interval`, cut to the range 0 to 1.
    """
    low, high = mean_interval(values_E) if len(values_E) > 1 else (math.nan, math.nan)
    return _mean_within(values_E, 0.0, 1.0) if math.isnan(low) else (max(0.0, low), min(1.0, high))


def difference_interval(values_E: np.ndarray) -> tuple[float, float]:
    """Return the interval of a mean over examples whose values are differences of shares, between -1 and 1."""
    return _mean_within(values_E, -1.0, 1.0)


def _mean_within(values_E: np.ndarray, least: float, most: float) -> tuple[float, float]:
    """Return `mean_interval` for the examples and two added ones, with the values mean + 1 and mean − 1. The interval
    is cut to the range `least` to `most`.

    Bonett and Price (2012) add them to differences of 0/1 outcomes. Without them, the interval would have nearly no
    width if few examples differ.
    """
    mean = values_E.mean()
    low, high = mean_interval(np.append(values_E, (mean - 1, mean + 1)))
    return max(least, low), min(most, high)


def moments(values_EN: np.ndarray) -> np.ndarray:
    """Return the mean over the E examples, and the standard error and the skewness of this mean, (3, N). The skewness
    of a mean is the skewness of the examples, divided by √E.

    The skewness is 0 if all examples are equal.
    """
    n, mean_N = len(values_EN), values_EN.mean(axis=0)
    centred_EN = values_EN - mean_N
    variance_N = (centred_EN**2).mean(axis=0)
    skewness_N = np.zeros_like(mean_N)
    np.divide((centred_EN**3).mean(axis=0), variance_N**1.5 * math.sqrt(n), out=skewness_N, where=variance_N > 0)
    return np.stack([mean_N, np.sqrt(variance_N / (n - 1)), skewness_N])


def skewed_ends(moments_3N: np.ndarray, quantile: float = QUANTILE) -> tuple[np.ndarray, np.ndarray]:
    """Return both ends of the interval of each mean, (N,) each (Hall 1992); NaN if the data do not support an interval.

    Student's t = (mean - truth) / stderr is transformed into t + a·t²/3 + a²·t³/27 + a/6, where a is the skewness of
    the mean. The result is close to normal even if t is not, and it rises with t, so it can be inverted. `quantile` is
    the quantile of the normal distribution, or of Student's.

    The ends are NaN if all examples are equal, or if the mean is more skewed than `MOST_SKEWED`. With this rule, at
    most 7 of 100 draws of 512 examples have a wrong interval, even if only 0.2 % of the examples lose a nat each. An
    interval cannot know of rare losses that are not in the sample: if 2 % of the examples lose a nat, 20 of 100 draws
    of 128 examples have too few of them.
    """
    mean_N, stderr_N, skewness_N = moments_3N
    a_N = np.where(np.abs(skewness_N) < 1e-6, 1e-6, skewness_N)  # the limit for 0 is t itself
    low_N, high_N = (
        mean_N - stderr_N * 3 / a_N * (np.cbrt(1 + a_N * (x - a_N / 6)) - 1) for x in (quantile, -quantile)
    )
    said_N = (stderr_N > 0) & (np.abs(skewness_N) <= MOST_SKEWED)
    return np.where(said_N, low_N, math.nan), np.where(said_N, high_N, math.nan)


def paired_interval(first_E: np.ndarray, second_E: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of a difference: the share of successes in `first` minus the share in `second`, on the same
    examples. Values are 0 or 1. See `counted_interval`."""
    return counted_interval(int((first_E > second_E).sum()), int((first_E < second_E).sum()), len(first_E), confidence)


def counted_interval(gained: float, lost: float, n: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of a difference of two shares of the same n examples, of which `gained` succeed only in the
    first share and `lost` only in the second.

    It is the score interval of Tango (1998, equations 8 to 11): all differences that McNemar's test does not reject.
    Unlike the bootstrap, it is reliable even if few or no examples differ.
    """
    quantile = NormalDist().inv_cdf((1 + confidence) / 2)

    def score(difference: float) -> float:
        b = (2 * n - gained + lost) * difference - gained - lost
        both = math.sqrt(max(b * b + 8 * n * lost * difference * (1 - difference), 0.0)) - b
        variance = n * (both / (2 * n) + difference * (1 - difference))
        return (gained - lost - n * difference) / math.sqrt(max(variance, 1e-12))

    observed = (gained - lost) / n
    return _root(score, -1.0, observed, quantile), _root(score, observed, 1.0, -quantile)


def _root(falling: Callable[[float], float], low: float, high: float, wanted: float) -> float:
    """Return the argument between `low` and `high` at which a falling function has the value `wanted`, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return high


def wilson_interval(values_E: np.ndarray) -> tuple[float, float]:
    """Return the interval of a share of successes (Wilson 1927). Unlike the bootstrap, it is reliable if all or none
    succeed."""
    n, share = len(values_E), float(np.mean(values_E))
    z = QUANTILE
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def with_interval(
    name: str, values_E: np.ndarray, interval: Callable[[np.ndarray], tuple[float, float]] = mean_interval
) -> dict[str, float]:
    """Return the mean over examples and its 95 % interval as three columns: `name`, `name_low` and `name_high`."""
    low, high = interval(values_E)
    return {name: float(values_E.mean()), f"{name}_low": low, f"{name}_high": high}


def sign_flip_p(differences_E: np.ndarray, seed: int = 0) -> float:
    """Return the two-sided p of paired differences, by giving them random signs: if only chance decides each sign, the
    expected mean difference is 0 (Fisher 1935).

    It is reliable if only a few examples differ: for four of one sign, p = 1/8.
    """
    signs_RE = np.random.default_rng(seed).choice([-1.0, 1.0], size=(SIGN_FLIPS, len(differences_E)))
    sums_R = np.abs(np.einsum("re,e->r", signs_RE, differences_E))
    observed = abs(float(differences_E.sum()))
    return (1 + int((sums_R >= observed * (1 - 1e-9)).sum())) / (1 + SIGN_FLIPS)


def student_interval(values_S: ArrayLike) -> tuple[float, float]:
    """Return the interval of the mean over a few seeds (Student 1908), for which the bootstrap is too narrow. It is NaN
    for fewer than `LEAST_RUNS` values: two equal values would give an interval without width. It assumes that the
    values have one centre. For ten models that fall into two groups, the interval contains the true mean in 89 % of
    cases; if one model in ten fails, in 65 % of cases.
    """
    return _student(values_S, 1.0)


def prediction_interval(values_S: ArrayLike) -> tuple[float, float]:
    """Return an interval for one new seed: mean ± t·s·√(1 + 1/S). It assumes that the values have one centre."""
    return _student(values_S, math.sqrt(len(np.asarray(values_S)) + 1))


def _student(values_S: ArrayLike, factor: float) -> tuple[float, float]:
    """Return the ends of the interval mean ± t · `factor` · standard error, with the quantile t of Student's
    distribution."""
    values_S = np.asarray(values_S, dtype=float)
    n = len(values_S)
    if n < LEAST_RUNS:
        return math.nan, math.nan
    mean, stderr = float(values_S.mean()), float(values_S.std(ddof=1)) / math.sqrt(n)
    half = factor * _student_quantile(n - 1) * stderr
    return mean - half, mean + half


def prunable(moments_3N: np.ndarray, tolerance: float, confidence: float = CONFIDENCE) -> np.ndarray:
    """Return True for each head that raises the mean loss by less than `tolerance` nats when it alone is closed, (N,).

    All these claims hold together at this `confidence` (Holm 1979). The p of each claim is from the test that
    corresponds to the interval of `skewed_ends`. A head with a NaN is not prunable, and does not count as a claim.
    """
    return holm(p_below(moments_3N, tolerance)) < 1 - confidence


def p_below(moments_3N: np.ndarray, tolerance: float, examples: ArrayLike = math.inf) -> np.ndarray:
    """Return the one-sided p of each mean against `tolerance`, (N,): small if the mean is below. `examples` are their
    numbers; with few of them Student's distribution has far longer tails than the normal one, which many tests need."""
    mean_N, stderr_N, a_N = moments_3N
    t_N = quotient(mean_N - tolerance, stderr_N)
    t_N = t_N + a_N * t_N**2 / 3 + a_N**2 * t_N**3 / 27 + a_N / 6
    free_N = np.broadcast_to(np.asarray(examples, dtype=float) - 1, t_N.shape)
    few_N, normal_N = np.isfinite(free_N), t_N.copy()
    free_N, t_N = free_N[few_N], t_N[few_N]
    # Wallace (1959): the normal quantile of Student's t; in the tails p is a few percent too large.
    normal_N[few_N] = (
        np.copysign(np.sqrt(free_N * np.log1p(t_N**2 / free_N)), t_N) * (8 * free_N + 1) / (8 * free_N + 3)
    )
    p_N = np.array([NormalDist().cdf(x) for x in normal_N])
    p_N[stderr_N == 0] = mean_N[stderr_N == 0] >= tolerance
    return p_N


def holm(p_N: np.ndarray) -> np.ndarray:
    """Return p values corrected for all N tests, (N,) (Holm 1979). A NaN is no test, and stays NaN."""
    order = np.argsort(p_N)  # a NaN comes last
    claims = np.count_nonzero(~np.isnan(p_N)) - np.arange(len(p_N))
    together_N = np.empty(len(p_N))
    together_N[order] = np.maximum.accumulate(claims * p_N[order])
    return np.minimum(1.0, together_N)


def quotient(part_R: np.ndarray, whole_R: np.ndarray) -> np.ndarray:
    """Return part / whole, (R,); NaN if the whole is not positive."""
    return np.divide(part_R, whole_R, out=np.full(len(part_R), math.nan), where=whole_R > 0)


@lru_cache
def _student_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t for which Student's distribution has the mass `confidence` between -t and t."""
    angle = _root(lambda angle: -student_mass(angle, degrees), 0.0, math.pi / 2, -confidence)
    return math.sqrt(degrees) * math.tan(angle)


def student_mass(angle: float, degrees: int) -> float:
    """Return the probability that |t| < √degrees · tan(angle), for Student's t with these degrees of freedom
    (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    odd = degrees % 2
    series, term = 0.0, math.cos(angle) if odd else 1.0
    for power in range(odd, degrees, 2):
        series += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + math.sin(angle) * series) if odd else math.sin(angle) * series
