"""Sentences of `experiment=interact`."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from mhaprune.heads import HeadId
from mhaprune.reporting.headline import Number
from mhaprune.tables import HEAD, INTERACTION, LOSS_RISE, OTHER_HEAD, Tables, in_unit, named, quality_name

STAND_IN, TOGETHER, BROKEN, NEITHER = "stand in for each other", "work together", "one breaks the model", "neither"
"""The values of the column `kind`; `NEITHER` if the interaction is small or not sure."""


def say(tables: Tables) -> Iterator[str]:
    """The pairs that stand in for each other most and that work together most, how many pairs do either, and what heads
    cost that go together."""
    pairs, unit = tables["pairs"], in_unit(tables)
    alone = dict(zip(named(tables["alone"]), tables["alone"][LOSS_RISE], strict=True))
    for what, sign in ((STAND_IN, 1), (TOGETHER, -1)):
        helped = [min(alone[a], alone[b]) < 0 for a, b in zip(named(pairs), other_heads(pairs), strict=True)]
        rows = pairs[(pairs["kind"] == what) & ~np.array(helped, dtype=bool)]  # closing a head that harms is no loss
        rows = rows.loc[(sign * rows[INTERACTION]).nlargest(1).index]
        for first, second, both in zip(named(rows), other_heads(rows), rows[LOSS_RISE], strict=True):
            yield (
                f"{first} and {second} {what} most: alone they cost {alone[first]:.3f} and"
                f" {alone[second]:.3f}{unit} on the report split, together {both:.3f}."
            )
    count = pairs["kind"].value_counts()
    more, less, full, rest = (int(count.get(kind, 0)) for kind in (STAND_IN, TOGETHER, BROKEN, NEITHER))
    least = f"at least {pairs['tolerance'].iloc[0]:g}{unit}"
    costs = f"cost {least}"
    yield (
        f"{more or 'None'} of {len(pairs)} pairs of heads {costs} more together than the sum of both alone"
        f"{': they can stand in for each other' if more else ''}. {less + full or 'None'} {costs} less. The other"
        f" {rest} differ by less than that, or not at 95 % confidence for all pairs together."
    )
    if full:
        yield (
            f"In {full} of the {less + full} that cost less, one of the two heads alone already leaves at most half of"
            f" {quality_name(tables)}: what the other costs in a broken model says little."
            f" {less or 'No'} {'pair works' if less == 1 else 'pairs work'} together."
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
    kinds = tables["pairs"]["kind"]
    return [
        Number(f"% of pairs that {kind}", 100 * float((kinds == kind).mean()), least=0.0, most=100.0)
        for kind in (STAND_IN, TOGETHER)
    ]


def other_heads(pairs: pd.DataFrame) -> list[HeadId]:
    """The second heads of the pairs."""
    return named(pairs[OTHER_HEAD].set_axis(HEAD, axis=1))
