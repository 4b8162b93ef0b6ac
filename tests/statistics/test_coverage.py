"""How often an interval holds the truth, on data like ours: skewed, or of which few examples differ.

`python tests/statistics/test_coverage.py` prints the table of every interval in use, beside the percentile bootstrap.
"""

import sys
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import pytest

from mhaprune.statistics import intervals
from mhaprune.statistics.intervals import mean_interval, student_interval

EXAMPLES = 512
Interval = Callable[[np.ndarray], tuple[float, float]]
Draw = Callable[[np.random.Generator, int], np.ndarray]


def rare(share: float, values: Draw) -> Draw:
    """Nothing but in this share of the examples."""
    return lambda draw, n: values(draw, n) * (draw.random(n) < share)


def signs(better: float, worse: float) -> Draw:
    """1, -1 or 0: what a difference of two outcomes is."""
    return lambda draw, n: draw.choice([1.0, -1.0, 0.0], size=n, p=[better, worse, 1 - better - worse])


def over_budgets(share: float) -> Draw:
    """The mean over seven budgets, of which about three differ in one example and none in most."""

    def values(draw: np.random.Generator, n: int) -> np.ndarray:
        means: np.ndarray = draw.choice([1.0, -1.0, 0.0], size=(n, 7), p=[0.32, 0.08, 0.6]).mean(axis=1)
        return means

    return rare(share, values)


MEANS: dict[str, tuple[Draw, float]] = {
    "normal, skewness 0": (lambda draw, n: draw.normal(size=n), 0.0),
    "exponential, skewness 2": (lambda draw, n: draw.exponential(size=n), 1.0),
    "lognormal, skewness 6": (lambda draw, n: draw.lognormal(size=n), float(np.exp(0.5))),
    "gamma, skewness 9": (lambda draw, n: draw.gamma(0.05, size=n), 0.05),
    "gamma, skewness 20": (lambda draw, n: draw.gamma(0.01, size=n), 0.01),
    "lognormal, skewness 33": (lambda draw, n: draw.lognormal(0, 1.5, size=n), float(np.exp(1.125))),
    "2 % lose a nat, the rest a little": (
        lambda draw, n: rare(0.02, lambda d, n: d.exponential(size=n))(draw, n) + draw.normal(0, 0.05, n),
        0.02,
    ),
}
LOST: dict[str, Draw] = {"a nat": lambda draw, n: np.ones(n), "some nats": lambda draw, n: draw.exponential(size=n)}
RARE: dict[str, tuple[Draw, float]] = {
    f"{100 * share:g} % lose {what}": (rare(share, values), share)
    for share in (0.002, 0.003, 0.005, 0.007, 0.01, 0.02)
    for what, values in LOST.items()
}
"""A sample may hold one of these examples, or none."""
DIFFERENCES: dict[str, tuple[Draw, float]] = {
    f"{100 * better:g} % better, {100 * worse:g} % worse": (signs(better, worse), better - worse)
    for better, worse in (
        (0.001, 0.0), (0.002, 0.0), (0.006, 0.0), (0.01, 0.0), (0.0145, 0.0), (0.004, 0.001), (0.02, 0.02), (0.1, 0.08)
    )
}  # fmt: skip
OVER_BUDGETS: dict[str, tuple[Draw, float]] = {
    f"{100 * share:g} % differ at some of seven budgets": (over_budgets(share), 0.24 * share)
    for share in (0.002, 0.01, 0.05)
}
SHARES: dict[str, tuple[Draw, float]] = {
    f"{100 * share:g} % miss half of their tokens": (
        lambda draw, n, share=share: 1 - 0.5 * (draw.random(n) < share),
        1 - 0.5 * share,
    )
    for share in (0.002, 0.01, 0.02, 0.1)
} | {
    "similarities, all near 1": (lambda draw, n: 1 - draw.exponential(0.04, size=n).clip(max=1), 0.96),
    "similarities, 2 % of which are low": (
        lambda draw, n: 1 - np.where(draw.random(n) < 0.02, 0.5, draw.uniform(0, 0.02, n)),
        1 - 0.02 * 0.5 - 0.98 * 0.01,
    ),
}
SUCCESSES: dict[str, tuple[Draw, float]] = {
    f"{100 * share:g} % are right": (lambda draw, n, share=share: 1.0 * (draw.random(n) < share), share)
    for share in (0.5, 0.9, 0.99, 0.998)
}
SEEDS: dict[str, tuple[Draw, float]] = {"normal": (lambda draw, n: draw.normal(size=n), 0.0)}

MODELS: dict[str, tuple[Draw, float]] = {
    "two groups, 80 % at 1": (lambda draw, n: 1.0 * (draw.random(n) < 0.8), 0.8),
    "one model in ten fails": (lambda draw, n: np.where(draw.random(n) < 0.1, 0.4, 0.98), 0.922),
    "lognormal, skewness 6": (lambda draw, n: draw.lognormal(size=n), float(np.exp(0.5))),
}


def of_pairs(differences_E: np.ndarray) -> tuple[float, float]:
    return intervals.paired_interval(differences_E > 0, differences_E < 0)


def percentile_bootstrap(values_E: np.ndarray) -> tuple[float, float]:
    """Efron 1979; the peer that the intervals in use are compared with."""
    low, high = np.quantile(resamples(len(values_E)) @ values_E, [0.025, 0.975])
    return float(low), float(high)


@cache
def resamples(n: int) -> np.ndarray:
    """(1000, n): the weight of each of n examples in each resample."""
    return np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=1000) / n


IN_USE: dict[str, tuple[Interval, Mapping[str, tuple[Draw, float]], int]] = {
    "mean_interval": (mean_interval, MEANS | RARE, EXAMPLES),
    "mean_interval of few": (mean_interval, RARE, 128),
    "share_interval": (intervals.share_interval, SHARES, EXAMPLES),
    "difference_interval": (intervals.difference_interval, DIFFERENCES | OVER_BUDGETS, EXAMPLES),
    "paired_interval": (of_pairs, DIFFERENCES, EXAMPLES),
    "wilson_interval": (intervals.wilson_interval, SUCCESSES, EXAMPLES),
    "student_interval": (student_interval, SEEDS, 3),
}
A_LITTLE = "2 % lose a nat, the rest a little"
OFF_ITS_CASES: dict[str, tuple[Interval, Mapping[str, tuple[Draw, float]], int]] = {
    "student_interval": (student_interval, MODELS, 5),
    "student_interval ": (student_interval, MODELS, 10),
    "mean_interval  ": (mean_interval, {A_LITTLE: MEANS[A_LITTLE]}, 128),
}
"""Data of which no formula on the sample can know. The docstrings say so, and the table how often it is wrong there."""
CASES = [(name, case) for name, (_, cases, _) in IN_USE.items() for case in cases]


def missed(interval: Interval, draw: Draw, truth: float, n: int, times: int) -> tuple[float, float]:
    """The shares of intervals that lie above the truth and below it. NaN, too little to say, does neither."""
    generator = np.random.default_rng(0)
    ends = np.array([interval(draw(generator, n)) for _ in range(times)])
    return float((ends[:, 0] > truth).mean()), float((ends[:, 1] < truth).mean())


@pytest.mark.parametrize("times", [300, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda part: part.replace(" ", "_"))
def test_it_covers_the_truth_nearly_as_often_as_it_says(name: str, case: str, times: int) -> None:
    """At least .93 instead of .95, up to the noise of so many draws."""
    interval, cases, n = IN_USE[name]
    noise = (0.93 * 0.07 / times) ** 0.5
    assert 1 - sum(missed(interval, *cases[case], n, times)) >= 0.93 - 2 * noise


@pytest.mark.parametrize(
    ("case", "least", "most"),
    [
        ("normal, skewness 0", 1, 1),
        ("exponential, skewness 2", 1, 1),
        ("lognormal, skewness 6", 0.98, 1),
        ("2 % lose a nat", 0.98, 1),
        ("0.2 % lose a nat", 0.15, 0.35),
        ("0.2 % lose some nats", 0.02, 0.2),
    ],
)
def test_an_interval_is_given_where_enough_examples_make_the_mean(case: str, least: float, most: float) -> None:
    generator, (draw, _) = np.random.default_rng(0), (MEANS | RARE)[case]
    given = [np.isfinite(mean_interval(draw(generator, EXAMPLES))).all() for _ in range(300)]
    assert least <= np.mean(given) <= most


def test_a_claim_of_many_heads_is_seldom_wrong_and_often_made() -> None:
    """24 heads that cost just as much as is tolerated; then as many that cost a tenth of it."""
    draw, tolerance, times = np.random.default_rng(0), 0.05, 200
    said = [
        intervals.prunable(intervals.moments(draw.gamma(0.05, scale, size=(EXAMPLES, 24))), tolerance)
        for scale in [1.0] * times + [0.1] * times
    ]
    assert np.mean([found.any() for found in said[:times]]) <= 0.05 + 3 * 0.015
    assert np.mean([found.all() for found in said[times:]]) >= 0.95


def table(times: int = 4000) -> str:
    lines = [
        "| interval, of how many | data | not wrong | above the truth | below it | given | percentile bootstrap |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (interval, cases, n) in (IN_USE | OFF_ITS_CASES).items():
        for case, (draw, truth) in cases.items():
            above, below = missed(interval, draw, truth, n, times)
            before = 1 - sum(missed(percentile_bootstrap, draw, truth, n, times))
            generator = np.random.default_rng(0)
            given = np.mean([np.isfinite(interval(draw(generator, n))).all() for _ in range(times)])
            cells = f"{1 - above - below:.3f} | {above:.3f} | {below:.3f} | {given:.2f} | {before:.3f}"
            lines.append(f"| {name.split()[0]} of {n} | {case} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(*map(int, sys.argv[1:])))
