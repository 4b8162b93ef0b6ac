"""Intervals that may be far wider than what they belong to: a panel has room for the points, and an arrow says that an
interval goes on."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

ARROWS = "; an arrow at the edge of a panel stands for an interval that goes on beyond it"
"""What a caption says of them."""


class Whisker(NamedTuple):
    """An interval in a panel."""

    place: float
    """On the axis across."""
    low: float
    high: float
    colour: Any


def room_for(values: pd.Series, ends: Iterable[float]) -> tuple[float, float]:
    """Return the ends of an axis that shows all values, and the ends of intervals that are not far wider: of two or
    three runs an interval may be so long that nothing else would be seen."""
    low, high = float(values.min()), float(values.max())
    span = max(high - low, 0.02 * max(abs(high), abs(low))) or 1.0
    ends = [end for end in ends if not np.isnan(end)]
    low, high = max(min([low, *ends]), low - span), min(max([high, *ends]), high + span)
    margin = 0.06 * (high - low or span)
    return low - margin, high + margin


def arrows_beyond(axes: Axes, whiskers: Iterable[Whisker], *, vertical: bool) -> bool:
    """Draw an arrow at the edge of the panel for every interval that leaves it there, and return whether there is one.
    Call it when the limits are set. What lies beyond as a whole has no arrow."""
    low, high = axes.get_ylim() if vertical else axes.get_xlim()
    found = False
    for whisker in whiskers:
        for edge, marker in ((low, "v" if vertical else "<"), (high, "^" if vertical else ">")):
            if whisker.low < edge < whisker.high:
                x, y = (whisker.place, edge) if vertical else (edge, whisker.place)
                style: Any = {"marker": marker, "markersize": 6, "color": whisker.colour, "clip_on": False}
                axes.plot([x], [y], linestyle="", zorder=5, **style)
                found = True
    return found
