"""The switch by which tests draw figures, and whether every word of a figure can be read."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from mhaprune.lab.reporting.plots import Plot


class Drawing:
    """Figures are most of the time of a small run, so in the tests none are drawn but where they are `wanted`."""

    wanted = False
    """By runs, and in what is collected from them."""
    collected = False
    """In what is collected only."""


@contextmanager
def drawing(**wanted: bool) -> Iterator[None]:
    """For fixtures whose runs should draw; a test says it by its marks `figures` and `collected_figures`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (wanted or {"wanted": True}).items():
            patch.setattr(Drawing, name, value)
        yield


SMALLEST = 9
"""Points; at half its size on a screen of 110 dots per inch a letter is then seven dots high."""


def words_in(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Every word in a figure and where it stands; ticks out of sight are not there."""
    figure.draw_without_rendering()
    hidden = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in hidden:
            yield text.get_text(), Text.get_window_extent(text)


def check_legible(plot: Plot) -> None:
    """No word is too small to be read at half size, clipped by the figure's edge or covered by another."""
    words, boxes = zip(*words_in(plot.figure), strict=True)
    small = {text.get_text() for text in plot.figure.findobj(Text) if text.get_fontsize() < SMALLEST}
    assert not small & set(words), (plot.name, small)
    low, high = np.array([box.min for box in boxes]), np.array([box.max for box in boxes])
    assert len(words) > 5
    clipped = (low < 0).any(axis=1) | (high > plot.figure.bbox.max).any(axis=1)
    assert not clipped.any(), (plot.name, np.array(words)[clipped])
    shared = (np.minimum(high[:, None], high) - np.maximum(low[:, None], low)).min(axis=2)
    np.fill_diagonal(shared, 0)
    covered = [(words[i], words[j]) for i, j in np.argwhere(shared > 2)]
    assert not covered, (plot.name, covered)
