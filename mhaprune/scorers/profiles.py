"""A profile: what each head does for each kind of examples.

Dimensions: P = pairs of a head and a kind.
"""

import logging
from collections.abc import Mapping

import numpy as np
import pandas as pd
from torch import Tensor

from mhaprune.data import Data
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.scoring import Scoring, kinds_table
from mhaprune.statistics.intervals import CONFIDENCE, MOST_SKEWED, holm, p_below, skewed_ends
from mhaprune.tables import HEAD, KIND, MOMENTS

log = logging.getLogger(__name__)

LEAST = 64
"""The smallest number of examples of a kind without a warning. With 64, 1,890 scores that are 0 in truth have a wrong
verdict among them in 0 to 7 of 100 draws, from heavy tails to twice the skewness of an exponential distribution; with
24 and 200 scores in 1 to 27."""
NEEDED, HURTS, UNDECIDED = "needed", "hurts", ""
"""The values of the column `verdict`."""
SHARED, OWN = "all kinds", "one kind"
"""The values of the column `needed_by`; empty for heads that some kinds need, or none."""


def told_apart(examples: Data) -> dict[str, Tensor]:
    """Return the positions of the examples of each kind; if the user told none apart, of the short and the long ones,
    up to the median length and above. Raises ValueError for examples of one length."""
    if len(kinds := examples.by_kind()) > 1:
        return kinds
    lengths_E = examples.lengths()
    is_long_E = lengths_E > lengths_E.median()
    kinds = {"short": (~is_long_E).nonzero().flatten().cpu(), "long": is_long_E.nonzero().flatten().cpu()}
    if len(kinds["long"]) < 2:
        raise ValueError("profile: needs kinds of examples, score={name: batches, ...} or a column kind")
    return kinds


def profile(scoring: Scoring, scorers: Mapping[str, Scorer]) -> pd.DataFrame:
    """Return a row for each head and kind of examples: the `score` with its 95 % interval, and what it says.

    `verdict` is "needed" for a score that is surely positive, "hurts" for one that is surely negative, and empty if it
    is undecided. Sure means that the corrected `p_together` is below 0.05: two one-sided tests for each head and kind,
    all corrected together (Holm 1979). `kinds_in_need` counts the kinds that need the head; `needed_by` is "all kinds",
    "one kind" or empty. For kinds see `told_apart`. Raises ValueError for a scorer that is not `signed` or has no
    scores of single examples.
    """
    if unsigned := [name for name, scorer in scorers.items() if not scorer.signed]:
        raise ValueError(f"scorer={unsigned[0]}: cannot say what hurts, choose attribution, ablation or shortlist")
    kinds = told_apart(scoring.examples)
    scores = kinds_table(scoring, scorers, kinds)
    if scores.empty or scores["stderr"].isna().all():
        raise ValueError(f"scorer={','.join(scorers)}: has no scores of single examples, choose another")
    if (fewest := min(map(len, kinds.values()))) < LEAST:
        log.warning("profile: a kind has %d examples; below %d, skewed scores are called sure too often", fewest, LEAST)
    moments_3P = scores[MOMENTS].to_numpy(dtype=float).T
    examples_P = scores[KIND].map({kind: len(rows) for kind, rows in kinds.items()}).to_numpy()
    low, high = skewed_ends(moments_3P)
    p_2P = np.stack([_p_above(moments_3P * [[sign], [1.0], [sign]], examples_P) for sign in (1.0, -1.0)])
    together_2P = holm(p_2P.ravel()).reshape(p_2P.shape)
    needed_P, hurts_P = together_2P < 1 - CONFIDENCE
    table = scores[["scorer", KIND, *HEAD, "score"]].assign(
        score_low=low, score_high=high, p_together=together_2P.min(axis=0)
    )
    table["verdict"] = np.select([needed_P, hurts_P], [NEEDED, HURTS], UNDECIDED)
    in_need = (table["verdict"] == NEEDED).groupby([table[column] for column in HEAD]).transform("sum")
    shared = in_need == len(kinds)
    return table.assign(kinds_in_need=in_need, needed_by=np.select([shared, in_need == 1], [SHARED, OWN], ""))


def _p_above(moments_3P: np.ndarray, examples_P: np.ndarray) -> np.ndarray:
    """Return the one-sided p of each mean against 0, small if it is above: the larger one of those with and without a
    correction for skewness, and 1 for a mean that depends on too few examples. So many tests ask for the far tails,
    where the correction is too bold for heavy tails, and none is too bold for skewed ones."""
    mean_P, stderr_P, skewness_P = moments_3P * [[-1.0], [1.0], [-1.0]]
    p_P = np.maximum(
        p_below(np.stack([mean_P, stderr_P, skewness_P]), 0.0, examples_P),
        p_below(np.stack([mean_P, stderr_P, 0 * skewness_P]), 0.0, examples_P),
    )
    return np.where(np.abs(skewness_P) > MOST_SKEWED, 1.0, p_P)
