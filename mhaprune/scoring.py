"""Run scorers over a subject and put what they say into tables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import pandas as pd
import torch

from mhaprune.data import Examples
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.statistics import spearman
from mhaprune.subject import Subject


class Scored(NamedTuple):
    """What one scorer gave, and how long it took."""

    scores: Scores
    seconds: float


def score_heads(subject: Subject, scorers: Mapping[str, Scorer], examples: Examples, seed: int) -> dict[str, Scored]:
    """Every scorer's scores by its name; raises ValueError naming the first head whose score is not finite."""
    scored = {}
    for name, scorer in scorers.items():
        start = time.perf_counter()
        scores = scorer(subject, examples, seed)
        for draw, n in (~torch.isfinite(scores.values)).nonzero().tolist():
            value, head = float(scores.values[draw, n]), subject.grid.heads[n]
            raise ValueError(f"scorer={name}: gives head {head} the score {value}, which is not finite")
        scored[name] = Scored(scores, time.perf_counter() - start)
    return scored


def heads_table(subject: Subject, scored: Mapping[str, Scored]) -> pd.DataFrame:
    """One row per scorer, draw and head; rank 1 is the most important head."""
    parts = []
    for name, (scores, seconds) in scored.items():
        for draw, values_N in enumerate(scores.values):
            frame = pd.DataFrame(
                {
                    "scorer": name,
                    "draw": draw,
                    "site": [str(head.site) for head in subject.grid],
                    "layer": [head.layer for head in subject.grid],
                    "head": [head.head for head in subject.grid],
                    "score": values_N.tolist(),
                    "stderr": float("nan") if scores.stderr is None else scores.stderr[draw].tolist(),
                }
            )
            frame["rank"] = frame["score"].rank(ascending=False, method="first").astype(int)
            parts.append(frame.assign(forward_passes=scores.forward_passes, seconds=seconds))
    return pd.concat(parts, ignore_index=True)


def agreement_table(heads: pd.DataFrame) -> pd.DataFrame:
    """Spearman's rank correlation of every two scorers over the heads; scorers that draw several times stay out."""
    draws = heads.groupby("scorer", sort=False)["draw"].nunique()
    columns = {name: heads.loc[heads["scorer"] == name, "score"] for name in draws.index[draws == 1]}
    rows = [
        {"scorer": first, "other": second, "spearman": spearman(columns[first], columns[second])}
        for first, second in combinations(columns, 2)
    ]
    return pd.DataFrame(rows, columns=["scorer", "other", "spearman"])
