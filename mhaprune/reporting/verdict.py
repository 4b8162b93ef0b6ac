"""Which heads stay and which can go, as an experiment's tables say it: what the map of heads shows."""

from __future__ import annotations

from math import nan
from typing import NamedTuple

import pandas as pd

from mhaprune.reporting.sentences import share
from mhaprune.tables import HEAD, Tables, in_unit, loss_unit, quality_name

REMOVED = "removed"
"""The name of a head that was gone already, before the run."""


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
    together: bool = True
    """Whether the heads that can go were removed together; if not, each of them can go alone."""
    unit: str = "nats"
    """The unit of the loss; empty for a loss without one."""


class SmallMap(NamedTuple):
    """The map of heads without scores and names."""

    title: str
    """The sum of it in one line."""
    rows: list[str]
    """A text per block: `1` for a head that stays, `0` for one that can go, a blank where there is no such head."""


def in_small(verdict: Verdict) -> SmallMap:
    rows: dict[tuple[str, int], dict[int, str]] = {}
    heads = verdict.heads
    for site, layer, head, stays in zip(heads["site"], heads["layer"], heads["head"], heads["stays"], strict=True):
        rows.setdefault((site, layer), {})[int(head)] = "1" if stays else "0"
    return SmallMap(verdict.title, ["".join(row.get(i, " ") for i in range(max(row) + 1)) for row in rows.values()])


def scored(heads: pd.DataFrame, scorer: str) -> pd.DataFrame:
    """The heads of a table `heads` with the scores of one scorer, NaN where it scored none; no head has a name yet."""
    rows = heads[(heads["scorer"] == scorer) & (heads["draw"] == 0)]
    if rows.empty:  # a schedule that needs no scorer
        rows = heads[heads["draw"] == 0].drop_duplicates(HEAD).assign(score=nan)
    return rows[[*HEAD, "score"]].assign(name="").reset_index(drop=True)


class Together(NamedTuple):
    """What closing all prunable heads at once does to the quality."""

    whole: float
    """The quality with all heads open."""
    left: float
    """The quality with all prunable heads closed."""


def prunable_alone(
    heads: pd.DataFrame, scorer: str, tolerance: float, tables: Tables, together: Together | None = None
) -> Verdict:
    """The verdict that takes one head at a time; `together` is None where it was not measured. `tables` name the
    quality and the unit of the loss."""
    count, total = int((~heads["stays"]).sum()), len(heads)
    meaning = (
        f"Empty tiles with a whole line are heads whose ablation costs less than {tolerance:g}{in_unit(tables)}, each"
        " alone, at 95 % confidence for all of these claims, on the score split; for the blue ones there is no such"
        " confidence."
    )
    if not count:
        title = f"None of {total} heads surely costs next to nothing when it is closed"
    else:
        some = f"any one of {count} heads" if count > 1 else "one head"
        title = f"Closing {some} (of {total}) costs next to nothing"
    if count and together is not None:
        closed = f"with all {count} closed" if count > 1 else "without it"
        whole, left = map(share, together)
        change = f"still {left}" if whole == left else f"{left} instead of {whole}"
        title += f"; {closed}, {quality_name(tables)} is {change}"
    elif count:
        meaning += " What is left without all of them at once was not measured."
    return Verdict(heads, scorer, title, meaning, together=False, unit=loss_unit(tables))
