"""What differs between runs: the settings to draw them against, and the columns to look at first."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from mhaprune.collecting.parts import Part
from mhaprune.reporting.headline import Number
from mhaprune.reporting.settings import Setting, by_use, setting
from mhaprune.tables import LABEL, varying

NOT_SET = "not set"


def settings_of(parts: Sequence[Part]) -> list[Setting]:
    """The settings that differ between runs, the seed left out, in the order in which figures use them.

    Of settings that always change together the first stands for all.
    """
    found: dict[tuple[int, ...], Setting] = {}
    for name in dict.fromkeys(name for part in parts for name in part.settings):
        values = [part.settings.get(name, NOT_SET) for part in parts]
        groups = tuple(pd.factorize(pd.Series(values))[0])
        if name != "seed" and max(groups) > 0 and groups not in found:
            found[groups] = setting(name, values)
    return by_use(found.values())


def numbers_of(parts: Sequence[Part], settings: Sequence[Setting]) -> pd.DataFrame:
    """A row per run and number by which it is compared first, with the values of these settings."""
    rows = [
        number._asdict() | {LABEL: part.label} | {each.name: part.settings.get(each.name, NOT_SET) for each in settings}
        for part in parts
        for number in part.headline
    ]
    return pd.DataFrame(rows, columns=[*Number._fields, LABEL, *(each.name for each in settings)])


def varying_first(frame: pd.DataFrame) -> pd.DataFrame:
    """The same table: first what a row is called, then the columns that vary, then those that never do."""
    varies = [name for name in varying(frame) if name != LABEL]
    return frame[[LABEL, *varies, *(name for name in frame if name not in (LABEL, *varies))]]
