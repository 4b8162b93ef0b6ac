"""Which heads matter, as the tables of a run say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import nan
from typing import NamedTuple

import pandas as pd

from mhaprune.recoveries import NOTHING
from mhaprune.scorers.agreement import HEAD, REFERENCE
from mhaprune.statistics import prunable

SITE_LABELS = {"encoder_self": "encoder self", "decoder_self": "decoder self", "cross": "cross"}
"""What figures call the sites, in the order of the model."""


class Verdict(NamedTuple):
    """`heads` has one row each, in the order of the model: whether it `stays`, its `score` (NaN where nothing scored
    it), and what it is doing (`name`, empty where that is not known). `title` sums it up, `meaning` says what it is to
    stay or not."""

    heads: pd.DataFrame
    scorer: str
    title: str
    meaning: str


def verdict(tables: Mapping[str, pd.DataFrame]) -> Verdict | None:
    """What the tables of one run say; None for tables that say nothing of single heads."""
    for name, judge in JUDGES.items():
        if name in tables:
            return judge(tables)
    return None


def largest_budget(summary: pd.DataFrame) -> pd.Series:
    """Of the scorers the one by which most heads can go; of equals the best on the choose split."""
    return summary.sort_values(["heads_removed", "choose_sequence_accuracy"], ascending=False, kind="stable").iloc[0]


def fewest_heads(smallest: pd.DataFrame) -> pd.Series:
    """The smallest model; of equals the best on the choose split."""
    order = smallest.sort_values(["heads_kept", "choose_sequence_accuracy"], ascending=[True, False], kind="stable")
    return order.iloc[0]


def _looked_at(tables: Mapping[str, pd.DataFrame]) -> Verdict:
    looks = tables["looks"]
    heads = looks[[*HEAD, "score", "name"]].assign(stays=~(looks["removed"] | looks["prunable"]))
    scorer = looks["scorer"].dropna().iloc[0]
    heads["name"] = heads["name"].astype(object).fillna("").mask(looks["removed"], "removed")
    there = ~looks["removed"]
    others = int((looks["prunable"] & there).sum())
    meaning = _alone(looks["tolerance"].iloc[0])
    if others:
        meaning += f" All {others} closed at once leave {looks['without_prunable'].iloc[0]:.2f} exact match."
    return Verdict(heads, scorer, _title_alone(heads["stays"][there]), meaning)


def _removed(tables: Mapping[str, pd.DataFrame]) -> Verdict:
    best = largest_budget(tables["summary"])
    names = set(tables["heads"]["scorer"])
    heads = _scored(tables["heads"], REFERENCE if REFERENCE in names else best["scorer"])
    gone = _split(best["removed"])
    heads["stays"] = ~_names(heads).isin(gone)
    title = f"{len(gone)} of {len(heads)} heads can go: {best['sequence_accuracy']:.2f} exact match is left"
    if not gone:
        title = f"None of {len(heads)} heads can go at the budgets tried"
    meaning = f"Empty tiles are heads that were removed together, as chosen by {best['scorer']}; blue ones stay."
    scorer = "" if heads["score"].isna().all() else REFERENCE if REFERENCE in names else best["scorer"]
    return Verdict(heads, scorer, title, meaning)


def _pruned(tables: Mapping[str, pd.DataFrame]) -> Verdict:
    smallest = tables["smallest"]
    best = fewest_heads(smallest[~smallest["control"]])
    names = {name: stays for stays in (False, True) for name in _split(best["kept" if stays else "removed"])}
    parts = [name.split(".") for name in names]
    heads = pd.DataFrame([(site, int(layer), int(head)) for site, layer, head in parts], columns=HEAD)
    heads = heads.assign(score=nan, name="", stays=list(names.values()))
    heads["place"] = heads["site"].map(list(SITE_LABELS).index)
    heads = heads.sort_values(["place", "layer", "head"]).drop(columns="place")
    title = f"{int(best['heads_kept'])} of {len(heads)} heads are enough: {best['sequence_accuracy']:.2f} exact match"
    if best["recovery"] != NOTHING and not _split(best["note"]):
        title += f" after {best['recovery']}"
    return Verdict(heads, "", title, "Empty tiles are heads that were removed together; blue ones stay.")


def _compared(tables: Mapping[str, pd.DataFrame]) -> Verdict | None:
    scores = tables["heads"]
    if REFERENCE not in set(scores["scorer"]):
        return None
    heads = _scored(scores, REFERENCE)
    mine = scores[scores["scorer"] == REFERENCE]
    tolerance = float(tables["winner"]["prunable_tolerance"].iloc[0])
    heads["stays"] = ~prunable(mine["score"].to_numpy(), mine["stderr"].to_numpy(), tolerance)
    return Verdict(heads, REFERENCE, _title_alone(heads["stays"]), _alone(tolerance))


def _scored(heads: pd.DataFrame, scorer: str) -> pd.DataFrame:
    mine = heads[(heads["scorer"] == scorer) & (heads["draw"] == 0)]
    if mine.empty:  # a schedule that asks nobody
        mine = heads[heads["draw"] == 0].drop_duplicates(HEAD).assign(score=nan)
    return mine[[*HEAD, "score"]].assign(name="").reset_index(drop=True)


def _split(names: object) -> list[str]:
    """The heads in a cell; one that was empty comes back from a file as NaN."""
    return names.split() if isinstance(names, str) else []


def _names(heads: pd.DataFrame) -> pd.Series:
    return heads["site"] + "." + heads["layer"].astype(str) + "." + heads["head"].astype(str)


def _title_alone(stays: pd.Series) -> str:
    return f"{int((~stays).sum())} of {len(stays)} heads are prunable, one at a time"


def _alone(tolerance: float) -> str:
    return (
        f"Empty tiles are heads whose ablation costs less than {tolerance:g} nats, each alone, at 95 % confidence on"
        " the score split; of the blue ones that cannot be said."
    )


JUDGES: Mapping[str, Callable[[Mapping[str, pd.DataFrame]], Verdict | None]] = {
    "looks": _looked_at,
    "summary": _removed,
    "smallest": _pruned,
    "winner": _compared,
}
"""By the table that a kind of run writes."""
