"""Why the scores are divided by √d_head: what softmax makes of queries and keys with and without that.

Dimensions: R = draws, U = keys, K = head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor


def softmax_gradient(weights: Tensor) -> Tensor:
    """The Frobenius norm of softmax's derivative, diag(a) − a aᵀ, at weights a (..., U): 0 where one of them is 1."""
    second, third = weights.square().sum(dim=-1), weights.pow(3).sum(dim=-1)
    return (second - 2 * third + second.square()).clamp(min=0).sqrt()


def entropy(weights: Tensor) -> Tensor:
    """In nats, over the last axis."""
    return -weights.xlogy(weights).sum(dim=-1)


def scaling_table(head_dims: Sequence[int], num_keys: int = 10, draws: int = 400, seed: int = 0) -> pd.DataFrame:
    """One row per d_head, with and without division by its root: of `draws` queries and `num_keys` keys each, with
    components drawn from a standard normal distribution as in Vaswani et al. 2017, footnote 4.

    `score_std` is the standard deviation of the scores, `entropy` (nats) and `gradient` (see `softmax_gradient`) are
    medians with quartiles `_q1` and `_q3`, and means `_mean`.
    """
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for head_dim in head_dims:
        query_RK = torch.randn(draws, head_dim, generator=draw, dtype=torch.float64)
        keys_RUK = torch.randn(draws, num_keys, head_dim, generator=draw, dtype=torch.float64)
        scores_RU = torch.einsum("rk,ruk->ru", query_RK, keys_RUK)
        for scaled in (True, False):
            entering_RU = scores_RU / math.sqrt(head_dim) if scaled else scores_RU
            weights_RU = entering_RU.softmax(dim=-1)
            row: dict[str, float] = {"head_dim": head_dim, "scaled": scaled, "num_keys": num_keys, "draws": draws}
            row["score_std"] = float(entering_RU.std())
            for name, values_R in (("entropy", entropy(weights_RU)), ("gradient", softmax_gradient(weights_RU))):
                q1, median, q3 = np.quantile(values_R.numpy(), (0.25, 0.5, 0.75))
                row |= {name: median, f"{name}_q1": q1, f"{name}_q3": q3, f"{name}_mean": float(values_R.mean())}
            rows.append(row)
    return pd.DataFrame(rows)


def with_and_without(query_K: Tensor, keys_UK: Tensor, open_U: Tensor) -> pd.DataFrame:
    """One row per key that the query may look at: its score and weight with and without the division."""
    raw_U = (keys_UK[open_U] @ query_K).double()
    scaled_U = raw_U / math.sqrt(len(query_K))
    return pd.DataFrame(
        {
            "key": open_U.nonzero()[:, 0].tolist(),
            "score": scaled_U.tolist(),
            "score_unscaled": raw_U.tolist(),
            "weight": scaled_U.softmax(dim=0).tolist(),
            "weight_unscaled": raw_U.softmax(dim=0).tolist(),
        }
    )
