"""Agreement between scorers: how similarly they rank the heads."""

from itertools import combinations
from math import nan

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from mhaprune.statistics.intervals import quotient
from mhaprune.tables import REFERENCE, candidates


def spearman(first_N: ArrayLike, second_N: ArrayLike) -> float:
    """Return Spearman's correlation of two lists of values: equal values get their average rank (Spearman 1904). NaN if
    one of the lists is constant."""
    # Twice the average rank, centred. Sums go by einsum, not `@`: the threads of NumPy's BLAS ignore num_threads.
    ranks = np.stack([2 * pd.Series(scores_N, dtype=float).rank().to_numpy() for scores_N in (first_N, second_N)])
    ranks -= ranks.shape[1] + 1
    products = np.einsum("in,jn->ij", ranks, ranks)
    return float(quotient(products[:1, 1], np.sqrt(products[0, :1] * products[1, 1]))[0])


def rank_agreement(heads: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one row per pair of scorers: Spearman's correlation of their scores. Scorers with several
    draws are left out."""
    scores = {name: heads.loc[heads["scorer"] == name, "score"] for name in candidates(heads)}
    rows = [(*pair, spearman(*(scores[name] for name in pair))) for pair in combinations(scores, 2)]
    return pd.DataFrame(rows, columns=["scorer", "other", "spearman"])


def with_reference(agreement: pd.DataFrame, scorer: str) -> float:
    """Return the correlation of the scores of `scorer` with the scores of `REFERENCE`. It is NaN for `REFERENCE`
    itself, and if `agreement` has no row for the pair, for example because one of them has several draws."""
    pair = agreement[["scorer", "other"]].isin([scorer, REFERENCE]).all(axis=1)
    return nan if scorer == REFERENCE or not pair.any() else float(agreement.loc[pair, "spearman"].iloc[0])
