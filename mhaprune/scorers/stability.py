"""Dependence of the most important heads on the examples that were drawn.

Dimensions: E = examples, N = heads, R = redraws.
"""

import math

import numpy as np
import torch
from torch import Tensor

TOP = 0.25
"""The share of all heads that count as the most important."""
REDRAWS = 200
AGREE = 0.95
"""The share of redraws in which the most important heads must be the same."""
MOST = 2**16
"""The largest number of examples that is tried, a power of two."""


def stability(values_EN: Tensor, seed: int = 0) -> dict[str, float]:
    """Return how the `TOP` of heads by their mean scores changes when examples are redrawn with replacement (a
    bootstrap: Efron 1979). `values_EN` are the scores on every example.

    `top_shared` is the share of these heads that two redraws of as many examples have in common, as a mean.
    `examples_needed` is the number of examples, a power of two, with which 95 % of redraws have exactly the heads of
    all examples; NaN if `MOST` are too few. Redraws of more examples than there are treat these as all that there are.
    """
    count, N = values_EN.shape
    if not N or count < 2:
        return unknown()
    top, draw = max(1, round(TOP * N)), np.random.default_rng(seed)
    whole_N = at_the_top(values_EN.mean(dim=0)[None], top)[0]

    def redrawn(n: int) -> Tensor:
        """Return which heads are at the top in each redraw of n examples, (R, N)."""
        times_RE = torch.from_numpy(draw.multinomial(n, [1 / count] * count, size=REDRAWS))
        return at_the_top(times_RE.to(values_EN) @ values_EN, top)

    first_RN, other_RN = redrawn(count).chunk(2)
    most_R = torch.maximum(first_RN.sum(dim=1), other_RN.sum(dim=1))
    shared = ((first_RN & other_RN).sum(dim=1) / most_R).double().mean()
    low, high = -1, int(math.log2(MOST)) + 1  # 2 ** high are enough, or too many to try
    while high - low > 1:
        middle = (low + high) // 2
        same = (redrawn(2**middle) == whole_N).all(dim=1).double().mean()
        low, high = (low, middle) if same >= AGREE else (middle, high)
    return {"top_shared": float(shared), "examples_needed": float(2**high) if 2**high <= MOST else math.nan}


def unknown() -> dict[str, float]:
    """Return the columns of a score without values for each example."""
    return {"top_shared": math.nan, "examples_needed": math.nan}


def at_the_top(scores_RN: Tensor, top: int) -> Tensor:
    """Return True for the largest scores of each row, (R, N), and for those that are equal to the last of them."""
    least_R = scores_RN.kthvalue(scores_RN.shape[1] + 1 - top, dim=1).values
    return scores_RN >= least_R[:, None]
