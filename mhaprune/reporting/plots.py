"""What every figure shares: a file name, a caption, one look; no torch, no model, only tables that a run wrote down."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from mhaprune.scorers.agreement import CONTROL

Tables = Mapping[str, pd.DataFrame]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette, which survives the common forms of colour blindness."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
CONTROL_COLOUR = "#888888"
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "mhaprune",
}


@dataclass(frozen=True, repr=False)
class Plot:
    """A figure with its file name, the sentences under it and, where these do not do, what it says to those who cannot
    see it."""

    name: str
    caption: str
    figure: Figure
    alt: str = ""

    @cached_property
    def png(self) -> bytes:
        """The figure as a file, byte for byte the same for the same tables."""
        return self._render("png", {"Software": None})

    @cached_property
    def svg(self) -> bytes:
        """The figure as a file, byte for byte the same for the same tables; its text is text."""
        return self._render("svg", {"Date": None})

    def __repr__(self) -> str:
        return self.alt or self.caption

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return self.png

    def _render(self, kind: str, metadata: dict[str, None]) -> bytes:
        buffer = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(buffer, format=kind, metadata=metadata, dpi=150)
        return buffer.getvalue()


def line_style(i: int) -> dict[str, Any]:
    """The colour and marker of the i-th line of a figure."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def candidates(frame: pd.DataFrame) -> list[str]:
    """Scorers that give one order of the heads, in the order of the table."""
    return [name for name in frame["scorer"].unique() if name not in controls(frame)]


def controls(frame: pd.DataFrame) -> list[str]:
    """Scorers that draw several orders."""
    draws = frame.groupby("scorer", sort=False)["draw"].nunique()
    return list(draws.index[draws > 1])


def errors(frame: pd.DataFrame, column: str) -> np.ndarray:
    """How far the interval of a column reaches down and up from it, as `errorbar` wants it."""
    return np.abs(np.stack([frame[column] - frame[f"{column}_low"], frame[f"{column}_high"] - frame[column]]))


def ceiling(highest: pd.Series, families: pd.Series) -> float:
    """Where an axis may end for the scorers that are no control; one far above would crowd them at its other end."""
    return 1.15 * max(highest[families != CONTROL].max(), 1.0) if (families != CONTROL).any() else np.inf


def draw_band(axes: Axes, curves: pd.DataFrame, x: str = "heads_removed") -> None:
    """The exact match of a control: the mean of its draws in a band from least to most."""
    band = curves.groupby(x)["sequence_accuracy"].agg(["min", "mean", "max"])
    label = f"{curves['scorer'].iloc[0]} ({curves['draw'].nunique()} draws)"
    axes.fill_between(band.index, band["min"], band["max"], color=CONTROL_COLOUR, alpha=0.2, linewidth=0)
    axes.plot(band.index, band["mean"], color=CONTROL_COLOUR, linestyle="--", label=label)


def columns_of(count: int, most: int) -> int:
    """How many panels to set in a row, at most `most`, for rows as equal as can be."""
    return -(-count // -(-count // most))


def panels(figure: Figure, count: int, columns: int, xlabel: str, ylabel: str = "", **options: Any) -> list[Axes]:
    """`count` axes in rows of `columns`, with ticks and labels only where no panel stands below or to the left."""
    grid = list(figure.subplots(-(-count // columns), columns, squeeze=False, **options).flat)
    for i, axes in enumerate(grid[:count]):
        lowest, first = i + columns >= count, i % columns == 0
        axes.tick_params(labelbottom=lowest, labelleft=first)
        axes.set(xlabel=xlabel if lowest else "", ylabel=ylabel if first else "")
    for axes in grid[count:]:
        axes.remove()
    return grid[:count]


def legend_above(figure: Figure, of: Axes | Sequence[Artist]) -> None:
    """What lines and marks mean, above all panels, in as many columns as the figure is wide enough for."""
    handles = of.get_legend_handles_labels()[0] if isinstance(of, Axes) else list(of)
    if not handles:
        return
    labels = [str(handle.get_label()) for handle in handles]
    width = 0.6 + 0.085 * max(map(len, labels))  # inches
    columns = max(1, int(figure.get_figwidth() / width))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns_of(len(labels), columns))


def write_cells(
    axes: Axes, image: AxesImage, values: np.ndarray, write: Callable[[float], str], size: float = 9
) -> None:
    """A number in every cell of a heat map, black on light and white on dark; what is NaN stays empty."""
    shades = np.asarray(image.to_rgba(np.ma.asarray(image.get_array())))[..., :3] @ (0.3, 0.59, 0.11)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "black" if shades[row, column] > 0.45 else "white"
            axes.text(column, row, write(value), ha="center", va="center", fontsize=size, color=colour)


def number(value: float, decimals: int) -> str:
    """With a real minus sign, and none before a zero; a dash where there is none."""
    return "–" if np.isnan(value) else f"{round(value, decimals) + 0.0:.{decimals}f}".replace("-", "−")


def power_of_ten(exponent: int) -> str:
    """10 to that power, in one line of text."""
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


LABEL_SIZE = 9.5
_DIRECTIONS = np.array(
    [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1), (0.5, 1), (-0.5, 1), (0.5, -1), (-0.5, -1)]
)
_DISTANCES = np.array((7, 12, 18, 26, 36, 50, 70, 95, 125))  # pixels


def label_points(axes: Axes, names: list[str], x: np.ndarray, y: np.ndarray, y_errors: np.ndarray) -> None:
    """Write each name by its point, off names and points and, where possible, bars and 0; farther off, on a line.

    Call it last: what is free can be seen only once the layout stands, so it is fixed from here on.
    """
    figure = axes.figure.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    pixels = axes.transData.transform
    points = pixels(np.c_[x, y])
    marks = np.hstack([points - 6, points + 6])
    bars = np.hstack([pixels(np.c_[x, y - y_errors[0]]) - 1, pixels(np.c_[x, y + y_errors[1]]) + 1])
    zero = pixels((x[0], 0))[1]
    bars = np.vstack([bars, (axes.bbox.x0, zero - 1, axes.bbox.x1, zero + 1)])
    sizes = [_text_size(figure, name) + 5 for name in names]
    boxes = np.full((len(names), 4), -1e9)  # far away: not placed yet
    off = np.zeros(len(names))
    directions, distances = np.repeat(_DIRECTIONS, len(_DISTANCES), axis=0), np.tile(_DISTANCES, len(_DIRECTIONS))
    for i in range(len(names)):
        centres = points[i] + directions * (sizes[i] / 2 + distances[:, None])
        places = np.hstack([centres - sizes[i] / 2, centres + sizes[i] / 2])
        lines = points[i] + np.linspace(0.15, 1, 20)[:, None, None] * (centres - points[i])
        outside = (places[:, :2] < axes.bbox.min).any(axis=1) | (places[:, 2:] > axes.bbox.max).any(axis=1)
        cost = distances + 1000 * (outside + _overlaps(places, boxes) + _overlaps(places, marks))
        gaps = _gaps(places, points)
        cost += 20 * _overlaps(places, bars) + 50 * (gaps.min(axis=1) < gaps[:, i] - 1)  # nearer to another point
        cost += 60 * (_crossings(lines, boxes) + _crossings(lines, np.delete(marks, i, axis=0)))
        best = cost.argmin()
        boxes[i], off[i] = places[best], distances[best]
    leader = {"arrowstyle": "-", "linewidth": 0.7, "color": CONTROL_COLOUR, "shrinkA": 0, "shrinkB": 3}
    style: Any = {"fontsize": LABEL_SIZE, "ha": "center", "va": "center", "textcoords": "offset points"}
    for i, name in enumerate(names):
        offset = ((boxes[i, :2] + boxes[i, 2:]) / 2 - points[i]) * 72 / figure.dpi
        axes.annotate(name, (x[i], y[i]), tuple(offset), arrowprops=leader if off[i] > _DISTANCES[0] else None, **style)


def _text_size(figure: Figure, words: str) -> np.ndarray:
    text = figure.text(0.5, 0.5, words, fontsize=LABEL_SIZE)
    size = np.asarray(text.get_window_extent().size)
    text.remove()
    return size


def _overlaps(places: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """With how many of the boxes each place overlaps; both are rows of left, bottom, right, top."""
    return ((places[:, None, :2] < boxes[:, 2:]) & (boxes[:, :2] < places[:, None, 2:])).all(axis=2).sum(axis=1)


def _gaps(places: np.ndarray, points: np.ndarray) -> np.ndarray:
    """How far each point is from each place: places × points."""
    beside = np.maximum(places[:, None, :2] - points, points - places[:, None, 2:])
    return np.linalg.norm(np.maximum(beside, 0), axis=2)


def _crossings(lines: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Through how many of the boxes each line runs; lines are points × lines × 2."""
    within = (lines[:, :, None] > boxes[:, :2]) & (lines[:, :, None] < boxes[:, 2:])
    return within.all(axis=3).any(axis=0).sum(axis=1)
