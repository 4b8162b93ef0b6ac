"""The number of heads that can be removed at a small loss, observed and at 95 % confidence, on the choose split."""

from collections.abc import Iterator, Mapping
from math import isnan, nan
from typing import Any

import pandas as pd

from mhaprune.reporting.headline import Number, share_number
from mhaprune.tables import (
    CHOOSE_DROP,
    CHOOSE_QUALITY,
    ENDS,
    NOTHING,
    QUALITY,
    QUARTILES,
    SURE,
    Tables,
    quality_name,
    timed_name,
    unit_name,
)


def summary_of(curve: pd.DataFrame, dense: pd.Series, tolerance: float, *more: str) -> dict[str, Any]:
    """Choose a row of `curve` for a summary, and return its quality, its speed-up and the columns `more`.

    `curve` has one model per row. The chosen model has the most heads removed among those that lose at most `tolerance`
    of exact match, as observed; if there is none, it is the dense model. `surely` computes the number at 95 %
    confidence.
    """
    within = curve[curve[CHOOSE_QUALITY] >= dense[CHOOSE_QUALITY] - tolerance]
    order = (within if len(within) else dense.to_frame().T).sort_values("heads_removed", ascending=False, kind="stable")
    ends = [f"{name}{end}" for name in (CHOOSE_DROP, QUALITY) for end in ENDS] + [f"speedup{q}" for q in QUARTILES]
    columns = order.iloc[0][["heads_total", "heads_removed", "removed", CHOOSE_QUALITY, *ends, *more]]
    return {"tolerance": tolerance, **columns, SURE: surely(curve, tolerance), "dense_quality": dense[QUALITY]}


def surely(curve: pd.DataFrame, tolerance: float) -> float:
    """Return the largest number of heads whose removal loses at most `tolerance` at 95 % confidence; 0 if there is
    none, NaN if a model has no interval.

    A budget passes if the upper end of its paired interval is within the tolerance. Budgets are tested from the fewest
    heads upwards, and the first that fails ends the test. So the confidence is 95 % for all budgets together (Maurer,
    Hothorn and Lehmacher 1995).
    """
    smaller = curve[curve["heads_removed"] > 0].sort_values("heads_removed", kind="stable")
    highest = smaller[f"{CHOOSE_DROP}_high"]
    if highest.isna().any():
        return nan
    sure = smaller[(highest <= tolerance).cummin()]
    return int(sure["heads_removed"].max()) if len(sure) else 0


def surely_words(row: Mapping[str, Any] | pd.Series) -> str:
    """Return in words how many heads can be removed at 95 % confidence; empty if not known."""
    sure = row.get(SURE, nan)
    if isnan(sure):
        return ""
    return f" ({int(sure) or 'none'} at 95 % confidence)"


def most_removed(summary: pd.DataFrame) -> pd.Series:
    """Return the row with the most heads removed. Of equal rows, the best on the choose split is returned."""
    return summary.sort_values(["heads_removed", CHOOSE_QUALITY], ascending=False, kind="stable").iloc[0]


def headline(summary: pd.DataFrame, tables: Tables) -> list[Number]:
    """Return three numbers for each recovery in a summary: heads that can be removed, quality and speed-up."""
    numbers, what = list[Number](), f"{unit_name(tables)} that can be removed"
    for recovery, rows in summary.groupby("recovery", sort=False):
        row, after = most_removed(rows), "" if recovery == NOTHING else str(recovery)
        total, sure = float(row["heads_total"]), row.get(SURE, nan)
        surely = "" if isnan(sure) or not row["heads_removed"] else f"{int(sure) or 'none'} of them at 95 % confidence"
        ends = (
            f"95 % interval {_percent(row, QUALITY, '_low', '_high')}; {_percent(row, 'dense_quality')} with all heads"
        )
        quartiles = f"{timed_name(tables)}; quartiles {row['speedup_q1']:.2f} to {row['speedup_q3']:.2f}"
        numbers += [
            Number(what, float(row["heads_removed"]), total, after, 0.0, total, surely),
            share_number(quality_name(tables), row[QUALITY], row["dense_quality"], after, ends),
            Number("times as fast", float(row["speedup"]), 1.0, after, 0.0, beside=quartiles),
        ]
    return numbers


def _percent(row: pd.Series, column: str, *ends: str) -> str:
    """Return shares as text in percent, `98.0 to 99.7 %`; other qualities as they are."""
    values = [float(row[f"{column}{end}"]) for end in ends or ("",)]
    shares = all(0 <= value <= 1 for value in values)
    return " to ".join(f"{100 * value:.1f}" if shares else f"{value:.3f}" for value in values) + " %" * shares


def caveats(tables: Tables, sure: bool, tolerance: float, recovered: str) -> Iterator[str]:
    """Yield sentences of caution. `sure` means that another sentence says "at 95 % confidence". Then this is explained,
    with a warning if the choose split is too small: if even the interval of the whole model against itself ends above
    the tolerance. Recoveries that failed, as the table named `recovered` says, are listed too."""
    if sure:
        yield (
            f"“At 95 % confidence” means: with that many {unit_name(tables)} removed, and with every smaller number,"
            f" the 95 % interval of the {quality_name(tables)} lost on the choose split ends within {tolerance:g}."
        )
        whole = tables.get("pruning", pd.DataFrame(columns=["heads_removed", f"{CHOOSE_DROP}_high"]))
        widest = whole.loc[whole["heads_removed"] == 0, f"{CHOOSE_DROP}_high"].min()
        if widest > tolerance:
            yield (
                "The choose split is too small for any such claim: even of the whole model against itself the interval"
                f" ends at {widest:.3f}."
            )
    if recovered in tables:
        failed = tables[recovered].query("note != ''")
        for (name, note), rows in failed.groupby(["recovery", "note"], sort=False):
            yield f"{name} failed for {len(rows)} of the models ({note})."
