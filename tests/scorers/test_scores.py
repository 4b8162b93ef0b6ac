"""What goes with a score that is a mean: its standard error and its skewness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from mhaprune.scorers.base import Scores
from mhaprune.statistics.intervals import moments


def test_a_mean_over_examples_has_the_moments_that_its_interval_needs() -> None:
    values = torch.from_numpy(np.random.default_rng(0).lognormal(size=(50, 4)))
    values[:, 2] = 1.5
    scores = Scores.mean_over_examples(values, 1)
    assert scores.stderr is not None
    assert scores.skewness is not None
    found = torch.cat([scores.values, scores.stderr, scores.skewness]).numpy()
    np.testing.assert_allclose(found, moments(values.numpy()), atol=1e-12)
    np.testing.assert_allclose(scores.skewness[0, :2], stats.skew(values[:, :2]) / 50**0.5)
    assert scores.skewness[0, 2] == 0, "nothing differs"


@pytest.mark.parametrize("relation", [-1.0, 0.0, 1.0])
def test_a_mean_over_tokens_has_the_error_of_a_ratio(relation: float) -> None:
    """That of leaving out one example after the other, which knows that long examples count more and that what they
    give may depend on their length."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 12, size=300)
    values = draw.normal(relation * lengths[:, None, None] / 4 + 2.0, 1.0, size=(300, 2, 12))
    counted = np.arange(12) < lengths[:, None]
    batches = [
        [(torch.from_numpy(values[at]), torch.from_numpy(counted[at]))] for at in np.array_split(np.arange(300), 7)
    ]
    scores = Scores.mean_over_tokens(batches, 1)
    sums, counts = (values * counted[:, None]).sum(axis=2), counted.sum(axis=1)[:, None]
    np.testing.assert_allclose(scores.values[0], sums.sum(axis=0) / counts.sum())
    left_out = (sums.sum(axis=0) - sums) / (counts.sum() - counts)
    jackknife = np.sqrt(299 / 300 * ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0))
    assert scores.stderr is not None
    np.testing.assert_allclose(scores.stderr[0], jackknife, rtol=0.02)
    of_means, of_tokens = stats.sem(sums / counts), values.transpose(0, 2, 1)[counted].std(axis=0) / counts.sum() ** 0.5
    assert any((abs(naive / jackknife - 1) > 0.05).all() for naive in (of_means, of_tokens)), "it must be told apart"
