"""What `experiment=interact` found, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from mhaprune.reporting.headline import Number
from mhaprune.statistics.intervals import student_interval
from mhaprune.tables import HEAD, INTERACTION, LABEL, LOSS_RISE, OTHER_HEAD, HeadName, Tables, in_unit, named

LOW, HIGH = f"{INTERACTION}_low", f"{INTERACTION}_high"


def say(tables: Tables) -> Iterator[str]:
    """The pairs that stand in for each other most and that work together most, how many pairs do either, and what heads
    cost that go together."""
    pairs = tables["pairs"]
    alone = dict(zip(named(tables["alone"]), tables["alone"][LOSS_RISE], strict=True))
    above, below = pairs[pairs[LOW] > 0], pairs[pairs[HIGH] < 0]
    strongest = {
        "stand in for each other": above.nlargest(1, INTERACTION),
        "work together": below.nsmallest(1, INTERACTION),
    }
    for what, rows in strongest.items():
        for first, second, both in zip(named(rows), other_heads(rows), rows[LOSS_RISE], strict=True):
            yield (
                f"{first.label} and {second.label} {what} most: alone they cost {alone[first]:.3f} and"
                f" {alone[second]:.3f}{in_unit(tables)}, together {both:.3f}."
            )
    yield (
        f"Of {len(pairs)} pairs of heads, {len(above)} cost more together than the sum of both alone, so they stand in"
        f" for each other, and {len(below)} cost less; for the other {len(pairs) - len(above) - len(below)} the 95 %"
        " interval of the difference holds 0."
    )
    for scorer, rows in tables["together"].groupby("scorer", sort=False):
        half = rows[rows["heads_removed"] <= rows["heads_total"] / 2].iloc[-1]
        yield (
            f"The {half['heads_removed']} heads that go first by {scorer} cost"
            f" {half['expected_alone']:.3f}{in_unit(tables)} by the sum of what each costs alone, and"
            f" {half[LOSS_RISE]:.3f} when all of them are gone; with the interactions of their pairs one expects"
            f" {half['expected_pairs']:.3f}."
        )


def headline(tables: Tables) -> list[Number]:
    """The shares of pairs that stand in for each other and that work together."""
    pairs = tables["pairs"]
    return [
        Number("% of pairs that stand in for each other", 100 * float((pairs[LOW] > 0).mean()), least=0.0, most=100.0),
        Number("% of pairs that work together", 100 * float((pairs[HIGH] < 0).mean()), least=0.0, most=100.0),
    ]


def over_runs(tables: Tables) -> Iterator[str]:
    """Task by task, over models: how many pairs interact."""
    pairs = tables["pairs"]
    for task, runs in pairs.groupby("task", sort=False):
        models = runs[LABEL].nunique()
        if models < 2:
            continue
        shares = [
            100 * (runs[column] * sign > 0).groupby(runs[LABEL]).mean() for column, sign in ((LOW, 1), (HIGH, -1))
        ]
        more, less = (f"{own.mean():.0f} % ({low:.0f} to {high:.0f})" for own in shares for low, high in [_ends(own)])
        yield (
            f"On {task}, over {models} models, {more} of the pairs of heads cost more together than the sum of both"
            f" alone, and {less} cost less (95 % intervals over models)."
        )


def other_heads(pairs: pd.DataFrame) -> list[HeadName]:
    """The second heads of the pairs."""
    return named(pairs[OTHER_HEAD].set_axis(HEAD, axis=1))


def _ends(shares: pd.Series) -> tuple[float, float]:
    low, high = student_interval(shares)
    return max(0.0, low), min(100.0, high)
