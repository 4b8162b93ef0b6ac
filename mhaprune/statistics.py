"""How sure we are: intervals and rank agreement.

Dimensions: E = examples.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import pandas as pd

CONFIDENCE = 0.95
RESAMPLES = 1000


def bootstrap_interval(values_E: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean over examples (Efron 1979). One seed resamples alike, so intervals are paired."""
    # Not `@`: the threads of NumPy's BLAS do not know about num_threads.
    means = np.einsum("re,e->r", _resampling_weights(len(values_E), seed), values_E)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


@lru_cache(maxsize=4)
def _resampling_weights(n: int, seed: int) -> np.ndarray:
    """(RESAMPLES, n): the share of each example in each resample, rows summing to 1."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n


def wilson_interval(values_E: np.ndarray) -> tuple[float, float]:
    """Interval of a share of successes (Wilson 1927): honest, unlike the bootstrap, where all or none succeed."""
    n, share = len(values_E), float(np.mean(values_E))
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def spearman(first: pd.Series, second: pd.Series) -> float:
    """Rank correlation of two columns in the same order; NaN where one of them is constant."""
    frame = pd.DataFrame({"first": first.to_numpy(), "second": second.to_numpy()})
    return float(frame.corr(method="spearman").loc["first", "second"])
