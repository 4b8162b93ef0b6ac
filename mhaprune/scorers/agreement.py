"""How alike scorers rank the heads of a table `heads`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pandas as pd

from mhaprune.statistics.rankings import (
    kendall,
    kendall_interval,
    overlap,
    overlap_interval,
    spearman,
    spearman_interval,
)
from mhaprune.tables import REFERENCE


def rank_agreement(heads: pd.DataFrame) -> pd.DataFrame:
    """One row per pair of scorers, with 95 % intervals over heads; scorers that draw several times stay out.

    `overlap` is the share of the `overlap_heads` lowest heads, half of all, that two scorers have in common.
    """
    draws = heads.groupby("scorer", sort=False)["draw"].nunique()
    columns = {name: heads.loc[heads["scorer"] == name, "score"].to_numpy() for name in draws.index[draws == 1]}
    rows: list[dict[str, Any]] = []
    for first, second in combinations(columns, 2):
        a, b = columns[first], columns[second]
        k = len(a) // 2
        row: dict[str, Any] = {"scorer": first, "other": second}
        for name, value, (low, high) in (
            ("spearman", spearman(a, b), spearman_interval(a, b)),
            ("kendall", kendall(a, b), kendall_interval(a, b)),
            ("overlap", overlap(a, b, k), overlap_interval(a, b, k)),
        ):
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
        rows.append(row | {"overlap_heads": k})
    return pd.DataFrame(rows, columns=None if rows else ["scorer", "other", "spearman"])


def with_reference(agreement: pd.DataFrame, scorer: str) -> Mapping[str, float]:
    """The row of a scorer and `REFERENCE`; empty for the reference itself and where one of the two is not ranked."""
    if scorer == REFERENCE:
        return {}
    pair = agreement[["scorer", "other"]].isin([scorer, REFERENCE]).all(axis=1)
    return {str(name): value for row in agreement[pair].to_dict("records") for name, value in row.items()}
