"""How alike two rankings of heads are, and how sure that is.

Dimensions: N = heads, R = resamples.

All sums are einsum, not `@`: the threads of NumPy's BLAS do not know about num_threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
from numpy.typing import ArrayLike

from mhaprune.statistics.intervals import CONFIDENCE, quotient

RESAMPLES = 1000


def spearman(first_N: ArrayLike, second_N: ArrayLike) -> float:
    """Correlation of the average ranks (Spearman 1904); NaN where one of the two is constant."""
    return _of_heads(_spearman, first_N, second_N)


def kendall(first_N: ArrayLike, second_N: ArrayLike) -> float:
    """Tau-b (Kendall 1945): pairs ordered alike less pairs ordered unlike; NaN where one of the two is constant."""
    return _of_heads(_kendall, first_N, second_N)


def overlap(first_N: ArrayLike, second_N: ArrayLike, k: int) -> float:
    """Share of the k lowest heads of the first that are among the k lowest of the second; NaN for k = 0.

    Ties go in the order of the heads, as in one-shot pruning. Raises ValueError if there are fewer than k heads.
    """
    return _of_heads(partial(_overlap, k), first_N, second_N)


def spearman_interval(first_N: ArrayLike, second_N: ArrayLike, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap over heads, with pairs kept together. Resamples without a correlation are left out."""
    return _over_heads(_spearman, first_N, second_N, seed)


def kendall_interval(first_N: ArrayLike, second_N: ArrayLike, seed: int = 0) -> tuple[float, float]:
    """As `spearman_interval`."""
    return _over_heads(_kendall, first_N, second_N, seed)


def overlap_interval(first_N: ArrayLike, second_N: ArrayLike, k: int, seed: int = 0) -> tuple[float, float]:
    """As `spearman_interval`; a head that stands r times in a resample takes up to r of the k lowest places."""
    return _over_heads(partial(_overlap, k), first_N, second_N, seed)


Agreement = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(N,), (N,) and how often each head stands in each resample, (R, N), to the statistic of each, (R,)."""


def _of_heads(agreement: Agreement, first_N: ArrayLike, second_N: ArrayLike) -> float:
    first_N, second_N = np.asarray(first_N, dtype=float), np.asarray(second_N, dtype=float)
    return float(agreement(first_N, second_N, np.ones((1, len(first_N))))[0])


def _over_heads(agreement: Agreement, first_N: ArrayLike, second_N: ArrayLike, seed: int) -> tuple[float, float]:
    first_N, second_N = np.asarray(first_N, dtype=float), np.asarray(second_N, dtype=float)
    values_R = agreement(first_N, second_N, _resamples(len(first_N), seed))
    return _percentiles(values_R[~np.isnan(values_R)])


def _spearman(first_N: np.ndarray, second_N: np.ndarray, counts_RN: np.ndarray) -> np.ndarray:
    def product(first_RN: np.ndarray, second_RN: np.ndarray) -> np.ndarray:
        return np.einsum("rn,rn,rn->r", counts_RN, first_RN, second_RN)

    # Heads below less heads above: twice the average rank, centred.
    ranks_RN = [np.einsum("rj,ij->ri", counts_RN, _signs(values_N)) for values_N in (first_N, second_N)]
    return _correlation(product, *ranks_RN)


def _kendall(first_N: np.ndarray, second_N: np.ndarray, counts_RN: np.ndarray) -> np.ndarray:
    def product(first_NN: np.ndarray, second_NN: np.ndarray) -> np.ndarray:
        return np.einsum("ri,ri->r", counts_RN, np.einsum("rj,ij->ri", counts_RN, first_NN * second_NN))

    return _correlation(product, _signs(first_N), _signs(second_N))


def _correlation(
    product: Callable[[np.ndarray, np.ndarray], np.ndarray], first: np.ndarray, second: np.ndarray
) -> np.ndarray:
    """(R,): the cosine under a product; of ranks it is Spearman's, of the order of pairs Kendall's (Daniels 1944)."""
    return quotient(product(first, second), np.sqrt(product(first, first) * product(second, second)))


def _overlap(k: int, first_N: np.ndarray, second_N: np.ndarray, counts_RN: np.ndarray) -> np.ndarray:
    if not 0 <= k <= len(first_N):
        raise ValueError(f"overlap k={k}: must be from 0 to {len(first_N)}")
    first_RN, second_RN = (_places(values_N, counts_RN, k) for values_N in (first_N, second_N))
    return quotient(np.minimum(first_RN, second_RN).sum(axis=1), first_RN.sum(axis=1))


def _signs(values_N: np.ndarray) -> np.ndarray:
    """(N, N): 1 where the row's head is above the column's, -1 where below, 0 where they are equal."""
    return np.sign(values_N[:, None] - values_N)


def _places(values_N: np.ndarray, counts_RN: np.ndarray, k: int) -> np.ndarray:
    """(R, N): how many of the k lowest places of a resample each head takes."""
    order_N = np.argsort(values_N, kind="stable")
    wanted_RN = counts_RN[:, order_N]
    free_RN = k - (wanted_RN.cumsum(axis=1) - wanted_RN)
    return np.clip(free_RN, 0, wanted_RN)[:, np.argsort(order_N)]


@lru_cache(maxsize=4)
def _resamples(n: int, seed: int) -> np.ndarray:
    """(RESAMPLES, n): how often each of n stands in each resample of n."""
    if n == 0:
        return np.zeros((RESAMPLES, 0))
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(float)


def _percentiles(values_R: np.ndarray) -> tuple[float, float]:
    if len(values_R) == 0:
        return math.nan, math.nan
    low, high = np.quantile(values_R, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
