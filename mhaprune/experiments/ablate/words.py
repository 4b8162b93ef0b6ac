"""Sentences of `experiment=ablate`, and its map of heads."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from mhaprune.experiments.can_go import if_too_few, sure_count, what_can_go, what_is_sure
from mhaprune.reporting.head_map import Verdict, scored
from mhaprune.reporting.headline import Number
from mhaprune.reporting.plots import correlation
from mhaprune.reporting.sentences import as_fast, share
from mhaprune.tables import (
    CHOOSE_QUALITY,
    INITIAL_GATE,
    NOTHING,
    QUALITY,
    REFERENCE,
    Tables,
    by_block,
    candidates,
    head_names,
    loss_unit,
    named,
    quality_name,
)

READ = ("heads_total", "heads_removed", CHOOSE_QUALITY, QUALITY, "dense_quality", "speedup")
"""The columns that the headline is made of."""
NO_NOTES = pd.DataFrame(columns=["recovery", "note"])


def recoveries(summary: pd.DataFrame) -> pd.Series:
    """The recovery of every row; nothing in a table that was written before there were any."""
    none = pd.Series(NOTHING, index=summary.index)
    return summary["recovery"].fillna(NOTHING) if "recovery" in summary else none


def as_they_are(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows of models that nothing was done to after the removal."""
    return summary[recoveries(summary) == NOTHING]


def largest_budget(summary: pd.DataFrame) -> pd.Series:
    """The row of the scorer that can remove the most heads. Ties go to the best on the choose split."""
    return summary.sort_values(["heads_removed", CHOOSE_QUALITY], ascending=False, kind="stable").iloc[0]


def head_map(tables: Tables) -> Verdict:
    """The heads of the largest budget, removed together."""
    best = largest_budget(as_they_are(tables["summary"]))
    names = set(tables["heads"]["scorer"])
    heads = scored(tables["heads"], REFERENCE if REFERENCE in names else best["scorer"])
    gone = set(head_names(best["removed"]))
    heads["stays"] = [head not in gone for head in named(heads)]
    left = f"{share(best[QUALITY])} {quality_name(tables)} is left"
    title = f"{len(gone)} of {len(heads)} heads removed: {left}"
    if not gone:
        title = f"None of {len(heads)} heads can go at the budgets tried"
    meaning = f"Dashed tiles are heads that were removed together, as chosen by {best['scorer']}; blue ones stay."
    scorer = "" if heads["score"].isna().all() else REFERENCE if REFERENCE in names else best["scorer"]
    return Verdict(heads, scorer, title, meaning, unit=loss_unit(tables))


def headline(tables: Tables) -> list[Number]:
    """Return how many heads can be removed and what that brings, without a recovery and after each."""
    summary = tables["summary"]
    columns = (summary[name] for name in READ)  # to_dict of all columns takes long, for a thousand runs
    best: dict[str, Mapping[str, Any]] = {}
    for name, *values in zip(recoveries(summary), *columns, strict=True):
        row = dict(zip(READ, values, strict=True))
        if name not in best or _furthest(row) > _furthest(best[name]):
            best[name] = row
    return [
        number for name, row in best.items() for number in what_can_go(row, "" if name == NOTHING else name, tables)
    ]


def _furthest(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the key of `largest_budget`."""
    return row["heads_removed"], row[CHOOSE_QUALITY]


def _headline(tables: Tables) -> str:
    """Say how many heads can go, and what is left."""
    best = largest_budget(as_they_are(tables["summary"]))
    total, dense, quality = int(best["heads_total"]), share(best["dense_quality"]), quality_name(tables)
    if best["heads_removed"] == 0:
        return f"None of {total} heads can go within {best['tolerance']:g} of the dense model's {dense} {quality}."
    return (
        f"{int(best['heads_removed'])} of {total} heads can go{_surely(best)}: {share(best[QUALITY])} {quality} is left"
        f" on the report split ({dense} with all)."
    )


def _scoring_alike(tables: Tables) -> list[str]:
    """The scorers whose scores are all equal. The gates of a model with one head per layer are: they cannot differ."""
    heads = tables.get("heads", pd.DataFrame(columns=["scorer", "draw", "score"]))
    scores = heads[heads["scorer"].isin(candidates(heads))].groupby("scorer", sort=False)["score"]
    return [str(name) for name, own in scores if len(own) > 1 and own.nunique() == 1]


def _after(row: Mapping[str, Any], tables: Tables) -> str:
    """Say the same after a recovery."""
    if not row["heads_removed"]:
        return f"After {row['recovery']} none can go."
    return (
        f"After {row['recovery']} {int(row['heads_removed'])} can go{_surely(row)}: {share(row[QUALITY])}"
        f" {quality_name(tables)} is left. {_which(row)} {as_fast(row, tables)}"
    )


def _which(row: Mapping[str, Any] | pd.Series) -> str:
    """Name the heads that are removed."""
    names = by_block(head_names(row["removed"]))
    return f"They are, as chosen by {row['scorer']} (site.layer: heads, counted from 0), {names}."


def _surely(row: Mapping[str, Any] | pd.Series) -> str:
    """Say how many can be removed at 95 % confidence; nothing in an older table."""
    sure = sure_count(row)
    return "" if sure is None else f" ({sure or 'none'} surely)"


def say(tables: Tables) -> Iterator[str]:
    """Say how many heads can go, which they are, what that brings, and what is uncertain."""
    yield _headline(tables)
    summary = tables["summary"]
    plain = as_they_are(summary)
    recovered = summary.drop(plain.index).to_dict("records")
    best = largest_budget(plain)
    if best["heads_removed"] > 0:
        yield f"{_which(best)} All others are kept."
        yield as_fast(best, tables)
    yield from (_after(row, tables) for row in recovered)
    if any(_surely(row) for row in (best, *recovered) if row["heads_removed"]):
        yield what_is_sure(best["tolerance"], quality_name(tables))
        yield from if_too_few(tables, best["tolerance"])
    for name in _scoring_alike(tables):
        yield f"{name} scores all heads alike, so it ranks none of them and agrees with no other score."
    for (name, note), failed in tables.get("recovered", NO_NOTES).dropna(subset="note").groupby(["recovery", "note"]):
        if note:
            yield f"{name} failed for {len(failed)} of the models ({note})."
    for row in tables.get("agreement", pd.DataFrame()).to_dict("records"):
        if row["other"] == INITIAL_GATE:
            yield f"The learned gates against what they started from: Spearman ρ = {correlation(row['spearman'])}."
