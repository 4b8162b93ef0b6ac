"""Which heads stay and which can go, as an experiment's tables say it: what the map of heads shows."""

from __future__ import annotations

from math import nan
from typing import NamedTuple

import pandas as pd

from mhaprune.tables import HEAD


class Verdict(NamedTuple):
    """A row per head in the order of the model, and what the rows mean."""

    heads: pd.DataFrame
    """The head, whether it `stays`, its `score` (NaN without one) and its `name`: what it does, empty where unknown."""
    scorer: str
    """Where the scores come from; empty without scores."""
    title: str
    """The sum of it in one line."""
    meaning: str
    """What it means to stay or to go."""


def scored(heads: pd.DataFrame, scorer: str) -> pd.DataFrame:
    """The heads of a table `heads` with the scores of one scorer, NaN where it scored none; no head has a name yet."""
    rows = heads[(heads["scorer"] == scorer) & (heads["draw"] == 0)]
    if rows.empty:  # a schedule that needs no scorer
        rows = heads[heads["draw"] == 0].drop_duplicates(HEAD).assign(score=nan)
    return rows[[*HEAD, "score"]].assign(name="").reset_index(drop=True)


def prunable_alone(heads: pd.DataFrame, scorer: str, tolerance: float, more: str = "") -> Verdict:
    """The verdict that takes one head at a time; `more` is appended to its meaning."""
    title = f"{int((~heads['stays']).sum())} of {len(heads)} heads are prunable, one at a time"
    meaning = (
        f"Empty tiles are heads whose ablation costs less than {tolerance:g} nats, each alone, at 95 % confidence"
        " for all of them together, on the score split; for the blue ones there is no such confidence."
    )
    return Verdict(heads, scorer, title, meaning + more)
