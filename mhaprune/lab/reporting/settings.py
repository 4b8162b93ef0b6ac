"""The axes and colours of figures for settings that vary between runs: numbers in ascending order, other values in
the given order."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from mhaprune.lab.reporting.heat_map import thinned
from mhaprune.lab.reporting.plots import MARKERS, line_style

LIGHTEST = 0.82
"""The beginning of the colour ramp; lighter colours could not be seen on white."""
MOST_LETTERS = 30
"""Number of letters that fit side by side below a panel."""


@dataclass(frozen=True)
class Setting:
    """A setting and its values in order; made by `setting`."""

    name: str
    values: tuple[str, ...]
    numeric: bool
    """Whether all values are numbers."""

    @cached_property
    def styles(self) -> dict[str, dict[str, Any]]:
        """A colour and a marker for each value: for numbers a ramp from light to dark, otherwise the usual colours."""
        looks = [line_style(i) for i in range(len(self.values))]
        if self.numeric and len(self.values) > 1:
            shades = [LIGHTEST * (1 - i / (len(looks) - 1)) for i in range(len(looks))]
            colours = [to_hex(colour) for colour in matplotlib.colormaps["viridis"](shades)]
            looks = [{"color": c, "marker": MARKERS[i % len(MARKERS)]} for i, c in enumerate(colours)]
        return dict(zip(self.values, looks, strict=True))

    def draw_axis(self, axes: Axes) -> None:
        """Make this setting the x axis: a tick per value, at equal distances, with its name if there is room."""
        names, count = list(self.values), len(self.values)
        if self.numeric:
            names = thinned(names, MOST_LETTERS // (max(map(len, names)) + 1))
        axes.set_xlim(-0.06 * count - 0.4, 1.06 * count - 0.6)
        axes.set_xticks(range(count), names)
        axes.set_xlabel(self.name)
        if not self.numeric and sum(map(len, names)) + count > MOST_LETTERS:
            for text in axes.get_xticklabels():
                text.set(rotation=30, horizontalalignment="right", rotation_mode="anchor")


def setting(name: str, values: Iterable[str]) -> Setting:
    """Return the setting with each value once: numbers ascending, other values in the given order."""
    once = list(dict.fromkeys(values))
    try:
        numeric = all(math.isfinite(float(value)) for value in once)
    except ValueError:
        numeric = False
    return Setting(name, tuple(sorted(once, key=float) if numeric else once), numeric)


ALL_RUNS = Setting("", ("all runs",), numeric=False)
"""The axis of a figure if only the seed varies."""


def for_figures(settings: Iterable[Setting]) -> list[Setting]:
    """Return settings as a figure needs them: numeric settings before others; in both groups, most values first."""
    return sorted(settings, key=lambda each: (not each.numeric, -len(each.values)))
