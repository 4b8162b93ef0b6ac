"""The number of heads that can be removed at a small loss, observed and at 95 % confidence, on the choose split."""

from collections.abc import Iterator, Mapping
from math import ceil, comb, isnan, nan
from typing import Any

import pandas as pd

from mhaprune.lab.reporting.headline import Number, quality_number
from mhaprune.lab.reporting.names import quality_name, timed_name, unit_name
from mhaprune.lab.reporting.sentences import Aside, quality_of
from mhaprune.statistics.intervals import ONE_SIDED, counted_interval
from mhaprune.tables import (
    CHOOSE_DROP,
    CHOOSE_EXAMPLES,
    CHOOSE_KIND,
    CHOOSE_MOST,
    CHOOSE_QUALITY,
    DENSE_QUALITY,
    ENDS,
    KIND,
    NOTHING,
    QUALITY,
    QUARTILES,
    SURE,
    Tables,
)

ROUNDING = 1e-9
"""The rounding of a difference of two means."""


def summary_of(curve: pd.DataFrame, dense: pd.Series, tolerance: float, *more: str) -> dict[str, Any]:
    """Choose a row of `curve` for a summary, and return its quality, its speed-up and the columns `more`.

    `curve` has one model per row. The chosen model has the most heads removed among those that lose at most `tolerance`
    of exact match, as observed; if there is none, it is the dense model. `surely` computes the number at 95 %
    confidence.
    """
    within = curve[curve[CHOOSE_DROP] <= tolerance + ROUNDING]
    order = (within if len(within) else dense.to_frame().T).sort_values("heads_removed", ascending=False, kind="stable")
    ends = [f"{name}{end}" for name in (CHOOSE_DROP, QUALITY) for end in ENDS] + [f"speedup{q}" for q in QUARTILES]
    whole = order.iloc[0].get(DENSE_QUALITY, dense[QUALITY])  # on the kind of examples of this row
    more = (*more, *(name for name in (KIND, CHOOSE_KIND) if name in order))
    columns = order.iloc[0][["heads_total", "heads_removed", "removed", CHOOSE_QUALITY, *ends, *more]]
    return {"tolerance": tolerance, **columns, SURE: surely(curve, tolerance), DENSE_QUALITY: whole}


def surely(curve: pd.DataFrame, tolerance: float) -> float:
    """Return the largest number of heads whose removal loses at most `tolerance` at 95 % confidence; 0 if there is
    none, NaN if a model has no interval.

    A budget passes if the upper end of its paired one-sided interval is within the tolerance. Budgets are tested from
    the fewest heads upwards, and the first that fails ends the test. So the confidence is 95 % for all budgets together
    (Maurer, Hothorn and Lehmacher 1995).
    """
    smaller = curve[curve["heads_removed"] > 0].sort_values("heads_removed", kind="stable")
    highest = smaller[CHOOSE_MOST]
    if highest.isna().any():
        return nan
    passing = smaller[(highest <= tolerance).cummin()]
    return int(passing["heads_removed"].max()) if len(passing) else 0


def surely_words(row: Mapping[str, Any] | pd.Series, tables: Tables) -> str:
    """Return in words how many heads can be removed at 95 % confidence; empty if not known."""
    sure = row.get(SURE, nan)
    return "" if isnan(sure) else f"{count_words(sure, tables)} at 95 % confidence"


def sizes_tried(tables: Tables) -> list[int]:
    """Return the numbers of heads whose removal was tried, ascending; empty if the tables do not say."""
    tried = [tables[name]["heads_removed"] for name in ("pruning", "recovery") if name in tables]
    return sorted({int(count) for column in tried for count in column if count > 0})


def not_tried(count: float, tables: Tables) -> bool:
    """Return True if this count of heads that can be removed is 0 only because fewer heads than the smallest size tried
    may be possible."""
    return count == 0 and sizes_tried(tables)[:1] > [1]


def count_words(count: float, tables: Tables) -> str:
    """Return a count of heads that can be removed: `12`, `none`, or `none of the sizes tried`."""
    return "none of the sizes tried" if not_tried(count, tables) else str(int(count) or "none")


def removable(count: float, total: int, tables: Tables) -> str:
    """Return the subject of a sentence about what can be removed: `12 of 24 heads`, `None of 24 heads`, or, if fewer
    heads were not tried, `None of the sizes tried (14 and 18 of 24 heads, not fewer)`."""
    units = unit_name(tables)
    if not not_tried(count, tables):
        return f"{int(count) or 'None'} of {total} {units}"
    sizes = sizes_tried(tables)
    listed = " and ".join(map(str, sizes)) if len(sizes) < 3 else f"{sizes[0]} to {sizes[-1]}"
    return f"None of the sizes tried ({listed} of {total} {units}, not fewer)"


def most_removed(summary: pd.DataFrame) -> pd.Series:
    """Return the row with the most heads removed. Of equal rows, the best on the choose split is returned."""
    return summary.sort_values(["heads_removed", CHOOSE_QUALITY], ascending=False, kind="stable").iloc[0]


def of_whole(row: Mapping[str, Any] | pd.Series, tables: Tables) -> str:
    """Return in words the quality of the whole model on the examples of a row: `94.0 % with all heads`, and on which
    kind of examples, if the row is of one."""
    on = f", on {row[KIND]}" if isinstance(row.get(KIND), str) else ""
    return f"{quality_of(row[DENSE_QUALITY], tables)} with all {unit_name(tables)}{on}"


def numbers_of_summary(summary: pd.DataFrame, tables: Tables) -> list[Number]:
    """Return three numbers for each recovery in a summary: heads that can be removed, quality and speed-up. Recoveries
    that help are first if nothing can be removed without one."""
    numbers, what = list[Number](), f"{unit_name(tables)} that can be removed"
    groups = sorted(
        summary.groupby("recovery", sort=False), key=lambda group: not most_removed(group[1])["heads_removed"]
    )
    for recovery, rows in groups:
        row, after = most_removed(rows), "" if recovery == NOTHING else str(recovery)
        total, count = int(row["heads_total"]), float(row["heads_removed"])
        surely = surely_words(row, tables) if count else ""
        if not_tried(count, tables):
            beside = removable(count, total, tables)
            count, surely = nan, beside[0].lower() + beside[1:]  # fewer may be possible, so it is not 0
        low, high = (quality_of(row[QUALITY + end], tables) for end in ENDS[1:])
        ends = f"95 % interval {low} to {high}; {of_whole(row, tables)}"
        quartiles = f"{timed_name(tables)}; quartiles {row['speedup_q1']:.2f} to {row['speedup_q3']:.2f}"
        numbers += [
            Number(what, count, float(total), after, 0.0, float(total), surely),
            quality_number(quality_name(tables), row[QUALITY], row[DENSE_QUALITY], after, ends),
            Number("times as fast", float(row["speedup"]), 1.0, after, 0.0, beside=quartiles),
        ]
    return numbers


def caveats(tables: Tables, best: Mapping[str, Any] | pd.Series, sure: bool, recovered: str) -> Iterator[str]:
    """Yield sentences of caution. `sure` means that another sentence says "at 95 % confidence". Then this is explained,
    with what a choose split of this size can decide. Recoveries that failed, as the table named `recovered` says, are
    listed too."""
    if sure:
        yield Aside(
            f"“At 95 % confidence” means: with that many {unit_name(tables)} removed, and with every smaller number"
            f" tried, the one-sided 95 % interval of the {quality_name(tables)} lost on the choose split ends within"
            f" {best['tolerance']:g}."
        )
        yield from map(Aside, _what_the_split_decides(tables, best))
    if recovered in tables:
        failed = tables[recovered].query("note != ''")
        for (name, note), rows in failed.groupby(["recovery", "note"], sort=False):
            yield f"{name} failed for {len(rows)} of the models ({note})."


def _what_the_split_decides(tables: Tables, best: Mapping[str, Any] | pd.Series) -> Iterator[str]:
    """Yield how many lost answers are too many for a split of this size, how often a small loss passes, and how many
    examples the model `best` needs. Nothing is yielded for a quality other than right or wrong."""
    curve = next((tables[name] for name in ("pruning", "recovery") if name in tables), pd.DataFrame())
    if quality_name(tables) != "exact match" or CHOOSE_EXAMPLES not in curve:
        return
    tolerance, n = float(best["tolerance"]), int(curve[CHOOSE_EXAMPLES].max())
    fails = fewest_that_fail(n, tolerance)
    if fails == 0:
        yield (
            f"The choose split is too small for any such claim: it has {n} examples, and even if no answer is lost"
            f" {examples_needed(0, tolerance):,} are needed."
        )
        return
    passes = sum(comb(n, k) * (tolerance / 2) ** k * (1 - tolerance / 2) ** (n - k) for k in range(fails))
    line = (
        f"With {n} examples {fails} lost answers, none gained, are too many: a true loss of {tolerance / 2:g} passes in"
    )
    line += f" {100 * passes:.0f} of 100 draws"
    if best[SURE] < best["heads_removed"] and best[CHOOSE_DROP] < tolerance:
        needed = examples_needed(best[CHOOSE_DROP], tolerance)
        line += f", and {int(best['heads_removed'])} {unit_name(tables)} need at least {needed:,} examples"
    yield f"{line}."


def fewest_that_fail(n: int, tolerance: float) -> int:
    """Return the smallest number of lost answers, with none gained, at which a loss of at most `tolerance` is no longer
    shown at 95 % confidence by n examples.

    >>> fewest_that_fail(512, 0.01), fewest_that_fail(128, 0.01)
    (2, 0)
    """
    return next((k for k in range(n) if counted_interval(k, 0, n, ONE_SIDED)[1] > tolerance), n)


def examples_needed(drop: float, tolerance: float) -> int:
    """Return the number of examples, with two digits, that show a loss of at most `tolerance` at 95 % confidence if
    this share of them is lost and none is gained. `drop` must be smaller than `tolerance`.

    >>> examples_needed(0.0, 0.01), examples_needed(0.005, 0.01)
    (270, 1100)
    """
    n = 1.0
    while counted_interval(drop * n, 0, n, ONE_SIDED)[1] > tolerance:
        n *= 1.01
    return ceil(float(f"{n:.2g}"))
