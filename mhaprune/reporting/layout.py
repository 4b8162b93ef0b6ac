"""Everything in a figure gets its place once. Both files are drawn from that, without looking for the places again.

To find them takes longer than to draw: matplotlib looks for the ticks of an axis some ten times in a layout, and for
ticks, the boxes of their labels, titles and legends again at every drawing. What stops it has names that it keeps for
itself, hence `Any`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import Formatter, LogFormatter


def place(figure: Figure) -> None:
    """Put everything in its place, once: afterwards nothing moves.

    The layout engine goes: as long as a figure has one, even one that does nothing, `savefig` draws twice.
    """
    if (layout := figure.get_layout_engine()) is None:
        return
    FigureCanvasAgg(figure)  # its renderer remembers how large texts are until the PNG is drawn
    every = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    for axis in every:
        _write_powers_plainly(axis)
        _remember_ticks(axis)
    for axes in figure.axes:
        for spine in axes.spines.values():  # they end where the axes end
            spine.set_in_layout(False)
    layout.execute(figure)
    figure.set_layout_engine(None)
    hidden: Any = figure
    renderer = hidden._get_renderer()
    for axes in figure.axes:
        _freeze_legend(axes, renderer)
        _freeze_titles(axes, renderer)
    for axis in every:
        _freeze(axis, renderer)


def _remember_ticks(axis: Axis) -> None:
    """Ticks and the boxes of their labels are looked for again only where the axis has another place or range."""
    hidden: Any = axis
    update, measure = hidden._update_ticks, hidden._get_ticklabel_bboxes
    known: dict[tuple[object, ...], Any] = {}

    def remembered(what: str, find: Callable[..., Any], *arguments: Any) -> Any:
        figure: Any = axis.get_figure(root=True)
        at = (what, *axis.axes.get_position().bounds, *axis.get_view_interval(), figure.dpi if arguments else None)
        if at not in known:
            known[at] = find(*arguments)
        return known[at]

    hidden._update_ticks = lambda: remembered("ticks", update)
    hidden._get_ticklabel_bboxes = lambda ticks, renderer: remembered("boxes", measure, ticks, renderer)


def _freeze(axis: Axis, renderer: Any) -> None:
    hidden: Any = axis
    if axis.label.get_text() and hidden._autolabelpos:
        if (locator := axis.axes.get_axes_locator()) is not None:  # a colour bar takes its place as it is drawn
            axis.axes.apply_aspect(locator(axis.axes, renderer))
        hidden._update_label_position(renderer)
        at = axis.axes.transAxes.inverted().transform(axis.label.get_transform().transform(axis.label.get_position()))
        axis.set_label_coords(*at)
    if not axis.get_major_formatter().get_offset():  # what those boxes are looked for
        hidden._get_ticklabel_bboxes = lambda ticks, renderer: ([], [])


def _freeze_titles(axes: Axes, renderer: Any) -> None:
    hidden: Any = axes
    if any(axes.get_title(loc) for loc in ("left", "center", "right")):
        hidden._update_title_position(renderer)
    hidden._autotitlepos = False


def _freeze_legend(axes: Axes, renderer: Any) -> None:
    """Where it hides least is looked for by comparing it with everything that is drawn."""
    legend = axes.get_legend()
    if isinstance(legend, Legend) and getattr(legend, "_loc", None) == 0:
        corner = legend.get_window_extent(renderer).min
        legend.set_loc(tuple(axes.transAxes.inverted().transform(corner)))


def _write_powers_plainly(axis: Axis) -> None:
    if isinstance(each := axis.get_major_formatter(), LogFormatter):
        axis.set_major_formatter(PlainPowers(each))
    if isinstance(each := axis.get_minor_formatter(), LogFormatter):
        axis.set_minor_formatter(PlainPowers(each))


class PlainPowers(Formatter):
    """10⁻³ as text, where matplotlib would set a formula: in an SVG it can be searched, and it is drawn at once."""

    def __init__(self, inner: Formatter) -> None:
        self.inner = inner

    def set_locs(self, locs: Any) -> None:
        super().set_locs(locs)
        self.inner.set_locs(locs)

    def __call__(self, x: float, pos: int | None = None) -> str:
        return plain(self.inner(x, pos))


def plain(formula: str) -> str:
    """`$\\mathdefault{2\\times10^{-3}}$` as 2×10⁻³; anything else as it is."""
    found = re.fullmatch(r"\$\\mathdefault\{(.*)\}\$", formula)
    if found is None:
        return formula
    text = found[1].replace("\\times", "×").replace("-", "−")
    return re.sub(r"\^\{(.*?)\}", lambda exponent: raised(exponent[1].replace("−", "-")), text)


def raised(number: str) -> str:
    """A whole number as an exponent."""
    return number.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
