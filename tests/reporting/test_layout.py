"""A figure is laid out once, and what is drawn afterwards is what would have been drawn without that."""

from __future__ import annotations

import re
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mhaprune.reporting.layout import plain
from mhaprune.reporting.plots import LAID_OUT, STYLE, Plot, lay_out


def figure_of_all_kinds() -> Figure:
    """Log axes, a twin, titles with ticks above, labels, a legend that hides least, a colour bar."""
    figure = Figure(figsize=(7, 5))
    (log, twin), (image, empty) = figure.subplots(2, 2)
    log.plot([1, 2, 3], [1e-3, 10, 1e4], label="a line")
    log.set(yscale="log", ylabel="loss", xlabel="step", title="both")
    log.legend()
    other = twin.twinx()
    other.plot([0, 1], [100000.5, 100000.9])
    other.set_ylabel("exact match")
    twin.set(xlabel="heads removed")
    drawn = image.imshow(np.arange(4).reshape(2, 2))
    image.xaxis.tick_top()
    image.set_title("above the ticks")
    figure.colorbar(drawn)
    empty.set_axis_off()
    return figure


def drawn() -> Plot:
    with matplotlib.rc_context(STYLE):
        return Plot("all", "", figure_of_all_kinds())


def pixels(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    with matplotlib.rc_context(LAID_OUT):
        canvas.draw()
    return np.asarray(canvas.buffer_rgba()).astype(int)


def test_what_is_frozen_looks_as_if_it_were_not() -> None:
    frozen, free = drawn().figure, drawn().figure
    for axis in (free.axes[0].yaxis, frozen.axes[0].yaxis):  # powers of ten are meant to look otherwise
        axis.set_major_formatter("{x:g}")
    lay_out(frozen)
    with matplotlib.rc_context(LAID_OUT):
        engine: Any = free.get_layout_engine()
        engine.execute(free)
        free.set_layout_engine(None)
        for one, other in zip(frozen.axes, free.axes, strict=True):
            other.set_position(one.get_position())
            if (legend := one.get_legend()) is not None and (same := other.get_legend()) is not None:
                corner = legend.get_window_extent().min
                assert corner == pytest.approx(same.get_window_extent().min, abs=20)
                same.set_visible(False)
                legend.set_visible(False)
    different = np.abs(pixels(frozen) - pixels(free)).max(axis=2) > 60
    assert different.mean() < 1e-3


def test_ticks_are_looked_for_once_for_a_layout_and_both_files(monkeypatch: pytest.MonkeyPatch) -> None:
    plot = drawn()
    axis: Any = plot.figure.axes[0].yaxis
    find, times = axis._update_ticks, []
    monkeypatch.setattr(axis, "_update_ticks", lambda: times.append(1) or find())
    lay_out(plot.figure)
    looked = len(times)
    assert looked <= 4, "twice for the layout, once where all have moved"
    assert plot.png
    assert plot.svg
    assert len(times) == looked


def test_powers_of_ten_are_text() -> None:
    svg = drawn().svg.decode()
    assert re.search(">10⁻[¹²³]</text>", svg)
    assert "mathdefault" not in svg


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (r"$\mathdefault{10^{-3}}$", "10⁻³"),
        (r"$\mathdefault{-10^{12}}$", "−10¹²"),
        (r"$\mathdefault{2\times10^{0}}$", "2×10⁰"),
        (r"$\mathdefault{0}$", "0"),
        ("0.5", "0.5"),
        ("", ""),
    ],
)
def test_a_formula_for_a_power_becomes_text(formula: str, text: str) -> None:
    assert plain(formula) == text
