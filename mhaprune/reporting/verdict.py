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
    mine = heads[(heads["scorer"] == scorer) & (heads["draw"] == 0)]
    if mine.empty:  # a schedule that needs no scorer
        mine = heads[heads["draw"] == 0].drop_duplicates(HEAD).assign(score=nan)
    return mine[[*HEAD, "score"]].assign(name="").reset_index(drop=True)


def prunable_alone(heads: pd.DataFrame, scorer: str, tolerance: float, more: str = "") -> Verdict:
    """The verdict that takes one head at a time; `more` is said after what it means."""
    title = f"{int((~heads['stays']).sum())} of {len(heads)} heads are prunable, one at a time"
    meaning = (
        f"Empty tiles are heads whose ablation costs less than {tolerance:g} nats, each alone, at 95 % confidence on"
        " the score split; of the blue ones that cannot be said."
    )
    return Verdict(heads, scorer, title, meaning + more)
