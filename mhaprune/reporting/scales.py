"""Axes on which equal ratios are equally far apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axis import XAxis, YAxis
from matplotlib.ticker import FixedLocator, MaxNLocator


def scale_in_ratios(axis: XAxis | YAxis, low: float, high: float, apart: float = 0.12) -> None:
    """Make an axis logarithmic from `low` to `high`, with a few plain numbers as ticks: `1.5`, not a power of ten.
    Between two of them lies at least the share `apart` of the axis, or their numbers would touch."""
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
    if high / low < 12:
        ticks: Sequence[float] = MaxNLocator(5, steps=(1, 2, 2.5, 5, 10)).tick_values(low, high)
    else:
        digits = (1, 2, 5) if high / low < 200 else (1,)
        exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
        ticks = [digit * 10.0**exponent for exponent in exponents for digit in digits]
    seen: list[float] = []
    for tick in ticks:
        if low <= tick <= high and (not seen or tick / seen[-1] > (high / low) ** apart):
            seen.append(tick)
    axis.set_ticks(seen, [f"{tick:,.6g}" for tick in seen])
    axis.set_minor_locator(FixedLocator([]))
    (axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim)(low, high)
