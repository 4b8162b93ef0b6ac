"""Names in figures: of marks, and beside the points of a scatter plot, placed where there is room."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mhaprune.reporting.plots import CONTROL_COLOUR, lay_out

SIGNS = {"<eos>": "end", "<bos>": "begin"}
"""Names of the marks of a sequence in figures."""
LABEL_SIZE = 9.5
_DIRECTIONS = np.array(
    [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1), (0.5, 1), (-0.5, 1), (0.5, -1), (-0.5, -1)]
)
_DISTANCES = np.array((7, 12, 18, 26, 36, 50, 70, 95, 125))
SCREEN = 110
"""Dots per inch of the pixels in which distances are given here, whatever the figure has."""


def label_points(axes: Axes, names: list[str], x: np.ndarray, y: np.ndarray, y_errors: np.ndarray) -> None:
    """Write each name by its point, clear of names and points and, if possible, of bars and 0; farther off, on a line.

    Call it last: it fixes the layout, because free space is known only for a fixed layout.
    """
    if not names:
        return
    figure = axes.figure.get_figure(root=True)
    assert figure is not None
    lay_out(figure)
    pixel = figure.dpi / SCREEN

    def pixels(data: Any) -> np.ndarray:
        return np.asarray(axes.transData.transform(data)) / pixel

    least, most = np.asarray(axes.bbox.min) / pixel, np.asarray(axes.bbox.max) / pixel
    points = pixels(np.c_[x, y])
    marks = np.hstack([points - 6, points + 6])
    bars = np.hstack([pixels(np.c_[x, y - y_errors[0]]) - 1, pixels(np.c_[x, y + y_errors[1]]) + 1])
    zero = pixels((x[0], 0))[1]
    bars = np.vstack([bars, (least[0], zero - 1, most[0], zero + 1)])
    sizes = [_text_size(figure, name) / pixel + 5 for name in names]
    boxes = np.full((len(names), 4), -1e9)  # far away: not placed yet
    off = np.zeros(len(names))
    directions, distances = np.repeat(_DIRECTIONS, len(_DISTANCES), axis=0), np.tile(_DISTANCES, len(_DIRECTIONS))
    for i in range(len(names)):
        centres = points[i] + directions * (sizes[i] / 2 + distances[:, None])
        places = np.hstack([centres - sizes[i] / 2, centres + sizes[i] / 2])
        lines = points[i] + np.linspace(0.15, 1, 20)[:, None, None] * (centres - points[i])
        outside = (places[:, :2] < least).any(axis=1) | (places[:, 2:] > most).any(axis=1)
        cost = distances + 1000 * (outside + _overlaps(places, boxes) + _overlaps(places, marks))
        gaps = _gaps(places, points)
        cost += 20 * _overlaps(places, bars) + 50 * (gaps.min(axis=1) < gaps[:, i] - 1)  # nearer to another point
        cost += 60 * (_crossings(lines, boxes) + _crossings(lines, np.delete(marks, i, axis=0)))
        best = cost.argmin()
        boxes[i], off[i] = places[best], distances[best]
    leader = {"arrowstyle": "-", "linewidth": 0.7, "color": CONTROL_COLOUR, "shrinkA": 0, "shrinkB": 3}
    style: Any = {"fontsize": LABEL_SIZE, "ha": "center", "va": "center", "textcoords": "offset points"}
    for i, name in enumerate(names):
        offset = ((boxes[i, :2] + boxes[i, 2:]) / 2 - points[i]) * 72 / SCREEN
        axes.annotate(name, (x[i], y[i]), tuple(offset), arrowprops=leader if off[i] > _DISTANCES[0] else None, **style)


def _text_size(figure: Figure, words: str) -> np.ndarray:
    text = figure.text(0.5, 0.5, words, fontsize=LABEL_SIZE)
    size = np.asarray(text.get_window_extent().size)
    text.remove()
    return size


def _overlaps(places: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """The number of boxes that each place overlaps; both are rows of left, bottom, right, top."""
    return ((places[:, None, :2] < boxes[:, 2:]) & (boxes[:, :2] < places[:, None, 2:])).all(axis=2).sum(axis=1)


def _gaps(places: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The distance of each point from each place: places × points."""
    beside = np.maximum(places[:, None, :2] - points, points - places[:, None, 2:])
    return np.linalg.norm(np.maximum(beside, 0), axis=2)


def _crossings(lines: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """The number of boxes that each line crosses; lines are points × lines × 2."""
    within = (lines[:, :, None] > boxes[:, :2]) & (lines[:, :, None] < boxes[:, 2:])
    return within.all(axis=3).any(axis=0).sum(axis=1)
