"""Settings that vary between runs as axes and colours: numbers in their order, all else as it comes."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from mhaprune.reporting.plots import MARKERS, line_style

LIGHTEST = 0.82
"""Where the ramp of colours begins; lighter ones would be lost on white."""
UNEVEN = 4
"""How many times wider than even steps an axis may be. Beyond that its values stand at equal distances."""
MOST_LETTERS = 30
"""Letters that fit side by side below a panel."""


@dataclass(frozen=True)
class Setting:
    """A setting and the values that it has, in their order: see `setting`."""

    name: str
    values: tuple[str, ...]
    numbers: tuple[float, ...] | None
    """The values as numbers; None where one of them is none."""

    @cached_property
    def places(self) -> dict[str, float]:
        """The places of the values on an axis, the two nearest of them 1 apart: on a linear scale or on a logarithmic
        one, whichever spreads them more evenly."""
        even = [float(i) for i in range(len(self.values))]
        scales = [even]
        if self.numbers is not None and len(self.numbers) > 1:
            positive = self.numbers[0] > 0
            scales = [_spread(self.numbers), *([_spread([math.log(x) for x in self.numbers])] if positive else [])]
        best = min(scales, key=lambda places: places[-1])
        return dict(zip(self.values, even if best[-1] > UNEVEN * len(even) else best, strict=True))

    @cached_property
    def styles(self) -> dict[str, dict[str, Any]]:
        """A colour and a marker for each value: of numbers one ramp from light to dark, else the usual ones."""
        looks = [line_style(i) for i in range(len(self.values))]
        if self.numbers is not None and len(self.values) > 1:
            shades = [LIGHTEST * (1 - i / (len(looks) - 1)) for i in range(len(looks))]
            colours = [to_hex(colour) for colour in matplotlib.colormaps["viridis"](shades)]
            looks = [{"color": c, "marker": MARKERS[i % len(MARKERS)]} for i, c in enumerate(colours)]
        return dict(zip(self.values, looks, strict=True))

    def draw_axis(self, axes: Axes) -> None:
        """Make this setting the x axis: a tick per value, with its name where there is room."""
        places = list(self.places.values())
        room = 0.5 if len(places) == 1 else 0.06 * (places[-1] - places[0]) + 0.35
        axes.set_xlim(places[0] - room, places[-1] + room)
        axes.set_xticks(places, self._names(places[-1] - places[0] + 2 * room))
        axes.set_xlabel(self.name)
        if self.numbers is None and sum(map(len, self.values)) + len(self.values) > MOST_LETTERS:
            for text in axes.get_xticklabels():
                text.set(rotation=30, horizontalalignment="right", rotation_mode="anchor")

    def _names(self, width: float) -> list[str]:
        """Return the names of the ticks; of numbers those that would touch the one before are left out."""
        if self.numbers is None:
            return list(self.values)
        names, end = [], -math.inf
        for value, place in self.places.items():
            half = 0.5 * width * (len(value) + 1) / MOST_LETTERS
            names.append(value if place - half >= end else "")
            end = place + half if names[-1] else end
        return names


def setting(name: str, values: Iterable[str]) -> Setting:
    """Return the setting with each value once: numbers from the smallest on, anything else in the given order."""
    once = list(dict.fromkeys(values))
    numbers = {value: _number(value) for value in once}
    if any(math.isnan(number) for number in numbers.values()):
        return Setting(name, tuple(once), None)
    once.sort(key=lambda value: numbers[value])
    return Setting(name, tuple(once), tuple(numbers[value] for value in once))


ALL_RUNS = Setting("", ("all runs",), None)
"""The axis where nothing varies but the seed."""


def by_use(settings: Iterable[Setting]) -> list[Setting]:
    """Sort settings into the order in which a figure uses them up: numbers before words, many values before few."""
    return sorted(settings, key=lambda each: (each.numbers is None, -len(each.values)))


def styles_of(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a colour and a marker for each label of runs, such as `num_heads=2`, in the order of a legend: a ramp
    where a single setting with numbers tells them apart."""
    pairs = {label: label.partition("=") for label in labels}
    names = {name for name, _, _ in pairs.values()}
    if len(names) != 1:
        return {label: line_style(i) for i, label in enumerate(pairs)}
    found = setting(names.pop(), [value for _, _, value in pairs.values()])
    labelled = {value: label for label, (_, _, value) in pairs.items()}
    return {labelled[value]: style for value, style in found.styles.items()}


def _number(value: str) -> float:
    """Return NaN for what is no number."""
    try:
        number = float(value)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _spread(numbers: Sequence[float]) -> list[float]:
    """Return ascending numbers, shifted to begin at 0 and scaled so that the two nearest of them are 1 apart."""
    gap = min(after - before for before, after in itertools.pairwise(numbers))
    return [(number - numbers[0]) / gap if gap > 0 else float(i) for i, number in enumerate(numbers)]
