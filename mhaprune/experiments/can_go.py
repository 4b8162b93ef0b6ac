"""The number of heads that can be removed at a small loss, observed and at 95 % confidence, on the choose split."""

from collections.abc import Iterator, Mapping
from math import isnan, nan
from typing import Any

import pandas as pd

from mhaprune.reporting.headline import Number, share_number
from mhaprune.tables import CHOOSE_DROP, CHOOSE_QUALITY, ENDS, NOTHING, QUALITY, QUARTILES, SURE, Tables, quality_name


def within_tolerance(curve: pd.DataFrame, dense: pd.Series, tolerance: float) -> tuple[pd.Series, float]:
    """Return the row of `curve` with the most heads removed that loses at most `tolerance` of exact match, or else the
    dense row; and the number of heads that can be removed at 95 % confidence.

    The row is chosen by the observed loss, the number by `surely`. `curve` has one model per row.
    """
    within = curve[curve[CHOOSE_QUALITY] >= dense[CHOOSE_QUALITY] - tolerance]
    best = (within if len(within) else dense.to_frame().T).sort_values("heads_removed", ascending=False, kind="stable")
    return best.iloc[0], surely(curve, tolerance)


def summary_of(curve: pd.DataFrame, dense: pd.Series, tolerance: float, *more: str) -> dict[str, Any]:
    """Return a row of a summary: the model with the most heads removed within the tolerance, its quality and speed-up,
    and the columns `more` of `curve`."""
    best, sure = within_tolerance(curve, dense, tolerance)
    ends = [f"{name}{end}" for name in (CHOOSE_DROP, QUALITY) for end in ENDS] + [f"speedup{q}" for q in QUARTILES]
    columns = best[["heads_total", "heads_removed", "removed", CHOOSE_QUALITY, *ends, *more]]
    return {"tolerance": tolerance, **columns, SURE: sure, "dense_quality": dense[QUALITY]}


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


def surely_words(row: Mapping[str, Any] | pd.Series, kept: bool = False) -> str:
    """Return in words how many heads can be removed at 95 % confidence, or must be `kept`; empty for a control."""
    sure = row.get(SURE, nan)
    if isnan(sure):
        return ""
    return f" ({int(row['heads_total'] - sure) if kept else int(sure) or 'none'} surely)"


def what_can_go(row: pd.Series, recovery: str, tables: Tables) -> list[Number]:
    """Return the first numbers of a summary's row: heads that can be removed after a recovery, quality, speed-up."""
    total, after = float(row["heads_total"]), "" if recovery == NOTHING else recovery
    return [
        Number("heads that can go", float(row["heads_removed"]), total, after, 0.0, total),
        share_number(quality_name(tables), row[QUALITY], row["dense_quality"], after),
        Number("times as fast", float(row["speedup"]), 1.0, after, 0.0),
    ]


def what_is_sure(tolerance: float, quality: str = "exact match") -> str:
    """Return the sentence that explains the number of heads that can be removed at 95 % confidence."""
    return (
        f"Surely means that the 95 % interval of the {quality} lost on the choose split ends within"
        f" {tolerance:g}, for that number of removed heads and for every smaller one."
    )


def if_too_few(tables: Tables, tolerance: float) -> Iterator[str]:
    """Yield a sentence if the choose split is too small to show any removal as safe. In that case the interval of the
    dense model against itself is already wider than the tolerance."""
    whole = tables.get("pruning", pd.DataFrame(columns=["heads_removed", f"{CHOOSE_DROP}_high"]))
    widest = whole.loc[whole["heads_removed"] == 0, f"{CHOOSE_DROP}_high"].min()
    if widest > tolerance:
        yield (
            "None can be sure with a choose split this small: even of the whole model against itself the interval ends"
            f" at {widest:.3f}."
        )
