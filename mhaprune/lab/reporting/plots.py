"""The toolkit of figures: a file name, a caption, one style. It needs only the tables of a run, not torch."""

from __future__ import annotations

import io
import pickle
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any
from weakref import WeakKeyDictionary

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, MaxNLocator

from mhaprune.tables import DENSE_QUALITY, ENDS, QUALITY, UNINFORMED, Tables

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette, which survives the common forms of colour blindness."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
CONTROL_COLOUR = "#888888"
SIGNS = {"<eos>": "end", "<bos>": "begin"}
"""Names of the special symbols of a sequence in figures."""
MOST_RUNS = 100
"""Largest number of runs that a figure shows one by one. More could not be told apart, and take minutes."""
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.h_pad": 0.06,  # inches; letters are a little wider at another resolution
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.06,
    "figure.dpi": 150,
    "font.sans-serif": ["DejaVu Sans"],  # part of matplotlib; a longer list would be repeated at each text of an SVG
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # letters that can be searched and edited, as journals ask
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "mhaprune",
}
LAID_OUT: Any = {**STYLE, "figure.constrained_layout.use": False}
"""The style for a figure whose layout is done: otherwise the layout would be computed again for each file."""

BREAK = "\0"
"""A mark in a text where a line may end."""
NARROW = 4.6
"""The width of a figure on a phone, in inches."""


@dataclass(frozen=True, repr=False)
class Plot:
    """A figure with its file name, its caption, and an `alt` text for blind readers; by default the caption."""

    name: str
    caption: str
    figure: Figure
    alt: str = ""
    appendix: bool = False
    """Whether the figure is for specialists: a page shows it folded, below the others."""
    tables: tuple[str, ...] = ()
    """The names of the tables that it was drawn from."""

    @cached_property
    def png(self) -> bytes:
        """The figure as a PNG file, with the same bytes for the same tables."""
        return self._render("png", {"Software": None}, pil_kwargs={"compress_level": 3})  # 6 takes twice as long

    @cached_property
    def svg(self) -> bytes:
        """The figure as an SVG file, with the same bytes for the same tables. Its text can be searched."""
        return self._render("svg", {"Date": None})

    @cached_property
    def pdf(self) -> bytes:
        """The figure as a PDF file, with the same bytes for the same tables."""
        return self._render("pdf", {"CreationDate": None})

    @cached_property
    def narrow(self) -> bytes:
        """The figure as an SVG file for a screen as narrow as a phone's; empty if its panels would be too small, if it
        is for specialists, or if it cannot be copied."""
        if self.appendix or not NARROW < self.figure.get_figwidth() <= 2 * NARROW:
            return b""
        parts = [self.figure, *self.figure.subfigs]
        # Legends keep copies of what they explain, so that the figure is copied together with the lines themselves.
        explained = [_HANDLES.get(legend) for part in parts for legend in part.legends]
        if None in explained or self.figure.canvas.manager is not None:  # of a plug-in, or of pyplot
            return b""
        try:
            figure, explained = pickle.loads(pickle.dumps((self.figure, explained)))
        except Exception:  # a plug-in's figure may hold anything, such as a function without name
            return b""
        legends = [legend for part in (figure, *figure.subfigs) for legend in part.legends]
        _HANDLES.update(zip(legends, explained, strict=True))
        figure.set_layout_engine("constrained")
        with matplotlib.rc_context(STYLE):
            _fit(figure, NARROW)
        return replace(self, figure=figure).svg

    def named(self, name: str) -> Plot:
        """Return the figure under another name."""
        return replace(self, name=name)

    def shape(self, width: float | None = None, dpi: int = 150) -> None:
        """Set the width in inches and the resolution, before the first file is made. Letters keep their size, so titles
        are broken and legends arranged anew; for the same reason, the height changes less than the width."""
        self.figure.set_dpi(dpi)  # text is measured at the resolution of the PNG file
        if width is not None:
            with matplotlib.rc_context(STYLE):
                _fit(self.figure, width)

    def __repr__(self) -> str:
        return self.alt or self.caption

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG file, for a notebook."""
        return self.png

    def _render(self, kind: str, metadata: dict[str, None], **options: Any) -> bytes:
        buffer = io.BytesIO()
        lay_out(self.figure)
        with matplotlib.rc_context(LAID_OUT):
            self.figure.savefig(buffer, format=kind, metadata=metadata, dpi=self.figure.dpi, **options)
        return buffer.getvalue()


def _fit(figure: Figure, width: float) -> None:
    """Make a figure this wide."""
    ratio = width / figure.get_figwidth()
    figure.set_size_inches(width, figure.get_figheight() * ratio**0.5)
    for text in figure.texts:
        text.set_text(wrapped(text.get_text(), 9.0 * width / float(text.get_fontsize())))
    for axes in figure.axes:
        place, names = axes.get_subplotspec(), [label.get_text() for label in axes.get_yticklabels()]
        room = width / place.get_gridspec().ncols - 0.4 if place is not None else width
        titles = [axes.get_title(side) for side in ("left", "center", "right")]
        for text in axes.findobj(Text):
            if isinstance(text, Text) and text.get_text() and text.get_text() in titles:
                text.set_text("\n".join(wrapped(line, room) for line in text.get_text().splitlines()))
        if ratio < 1 and any("\n" in wrapped(name, 1.4) for name in names):
            axes.set_yticks(axes.get_yticks(), [wrapped(name, 1.4) for name in names])
    parts: list[Any] = [figure, *figure.subfigs]
    for part in parts:
        for legend in list(part.legends):
            legend.remove()
            legend_above(part, _HANDLES[legend], " ".join(legend.get_title().get_text().split()))


Drawn = Plot | Iterable[Plot] | None
Figures = tuple[Callable[[Tables], Drawn], ...]
"""Functions that draw figures from tables. Each returns None if a table that it needs is missing."""


def needs(*names: str) -> Callable[[Callable[[Tables], Drawn]], Callable[[Tables], Iterable[Plot]]]:
    """Return a decorator. The decorated function draws nothing if one of these tables is missing or empty, and its
    figures name these tables."""

    def wrap(figure: Callable[[Tables], Drawn]) -> Callable[[Tables], Iterable[Plot]]:
        @wraps(figure)
        def drawn(tables: Tables) -> Iterator[Plot]:
            if all(len(tables.get(name, ())) for name in names):
                yield from (replace(plot, tables=names) for plot in plots_of(figure(tables)))

        return drawn

    return wrap


def appendix(figure: Callable[[Tables], Drawn]) -> Callable[[Tables], Iterable[Plot]]:
    """Return a function that draws the same figures, for the appendix of a page."""

    @wraps(figure)
    def drawn(tables: Tables) -> Iterator[Plot]:
        yield from (replace(plot, appendix=True) for plot in plots_of(figure(tables)))

    return drawn


def plots_of(drawn: Drawn) -> Iterable[Plot]:
    return [drawn] if isinstance(drawn, Plot) else drawn or ()


def draw(figures: Figures, tables: Tables) -> Iterator[Plot]:
    """Yield every figure whose tables are there, in the project's style."""
    for figure in figures:
        with matplotlib.rc_context(STYLE):
            plots = list(plots_of(figure(tables)))
        yield from plots


_PLACES: ContextVar[Iterator[Any]] = ContextVar("places")
"""Where the next figures are drawn, one after the other; None for a figure of its own."""


def new_figure(**size: Any) -> Any:
    """Return a new figure, or the place that `in_place_of` has for it."""
    return next(_PLACES.get(iter(())), None) or Figure(**size)


@contextmanager
def in_place_of(axes: Axes, number: int) -> Iterator[None]:
    """While this lasts, draw the figure of this number, counted from 0, in the place of axes, which are removed."""
    figure, place = axes.figure, axes.get_subplotspec()
    if figure is None or place is None or figure.get_layout_engine() is None:  # else a legend would lie on the panels
        raise ValueError("ax: must be in the grid of a figure such as plt.subplots(layout='constrained') makes")
    axes.remove()
    token = _PLACES.set(iter([None] * number + [figure.add_subfigure(place)]))
    try:
        yield
    finally:
        _PLACES.reset(token)


def lay_out(figure: Figure) -> None:
    """Compute the layout once, so that nothing moves afterwards.

    The layout engine is removed: with any engine, `savefig` draws twice.
    """
    if (layout := figure.get_layout_engine()) is None:
        return
    FigureCanvasAgg(figure)  # its renderer remembers how large texts are
    for axes in figure.axes:
        for spine in axes.spines.values():  # spines never reach beyond the axes
            spine.set_in_layout(False)
    with matplotlib.rc_context(LAID_OUT):
        layout.execute(figure)
        figure.set_layout_engine(None)


def line_style(i: int) -> dict[str, Any]:
    """Return the colour and marker of the i-th line of a figure. A repeated colour has another marker."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]}


def errors(frame: pd.DataFrame, column: str, ends: Sequence[str] = ENDS) -> np.ndarray:
    """Return the distances from a column to the lower and the upper ends of its intervals, for `errorbar`."""
    return np.abs(np.stack([frame[column] - frame[f"{column}{end}"] for end in ends[1:]]))


def ceiling(highest: pd.Series, families: pd.Series) -> float:
    """Return the upper end of an axis for all but controls. A very high control would squeeze the others."""
    return 1.15 * max(highest[families != UNINFORMED].max(), 1.0) if (families != UNINFORMED).any() else np.inf


def room_for(values: pd.Series, ends: Iterable[float]) -> tuple[float, float]:
    """Return the ends of an axis that shows all values and all intervals, which end at `ends`."""
    seen = pd.concat([values, pd.Series(list(ends), dtype=float)]).dropna()
    low, high = float(seen.min()), float(seen.max())
    margin = max(0.06 * (high - low), 0.01 * max(abs(low), abs(high))) or 0.06  # a tiny difference fills no panel
    return low - margin, high + margin


def columns_of(count: int, most: int) -> int:
    """Return the number of panels in a row, at most `most`, so that rows are as equal as possible."""
    return -(-count // -(-count // most))


def panels(
    figure: Figure | SubFigure, count: int, columns: int, xlabel: str, ylabel: str = "", **options: Any
) -> list[Axes]:
    """Return `count` axes in rows of `columns`. Only the lowest and leftmost panels have tick and axis labels."""
    grid = list(figure.subplots(-(-count // columns), columns, squeeze=False, **options).flat)
    for i, axes in enumerate(grid[:count]):
        lowest, first = i + columns >= count, i % columns == 0
        axes.tick_params(labelbottom=lowest, labelleft=first)
        axes.set(xlabel=xlabel if lowest else "", ylabel=ylabel if first else "")
    for axes in grid[count:]:
        axes.remove()
    return grid[:count]


def panelled(
    count: int, most: int, cell: tuple[float, float], room: tuple[float, float], *labels: str, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a new figure with `count` panels, at most `most` in a row. In inches, `cell` is the width and height of a
    panel, and `room` is the free width and height around all panels."""
    columns = columns_of(count, most)
    rows = -(-count // columns)
    figure = new_figure(figsize=(room[0] + cell[0] * columns, room[1] + cell[1] * rows))
    return figure, panels(figure, count, columns, *labels, **options)


def draw_curve(
    axes: Axes, frame: pd.DataFrame, x: str, y: str = QUALITY, ends: Sequence[str] = ENDS, **style: Any
) -> None:
    """Draw column `y` against column `x` as a line with intervals, whose ends are columns named `y` + one of `ends`."""
    frame = frame.sort_values(x, kind="stable")
    axes.errorbar(frame[x], frame[y], errors(frame, y, ends), **{"capsize": 2, "elinewidth": 1, **style})


def beside_whole(table: pd.DataFrame, by_kind: bool = True) -> pd.DataFrame:
    """Return a table, if its rows are of several kinds of examples (`by_kind`), with changes of the quality from that
    of the whole model on the same kind: so rows of one curve can be compared. Else return the table as it is."""
    if not by_kind:
        return table
    ends = [name for name in (QUALITY, *(QUALITY + end for end in ENDS)) if name in table]
    return table.assign(**{name: table[name] - table[DENSE_QUALITY] for name in ends}, **{DENSE_QUALITY: 0.0})


def draw_band(axes: Axes, draws: pd.DataFrame, **style: Any) -> None:
    """Draw the quality of several draws of a control against the heads removed: their mean as a line, their range as a
    band."""
    band = draws.groupby("heads_removed")[QUALITY].agg(["min", "mean", "max"])
    axes.fill_between(band.index, band["min"], band["max"], color=CONTROL_COLOUR, alpha=0.2, linewidth=0)
    axes.plot(band.index, band["mean"], **{"color": CONTROL_COLOUR, **style})


def mark_choice(axes: Axes, rows: pd.DataFrame, x: str = "heads_removed") -> None:
    """Ring the choice of each row of a summary, and draw a line at the dense model's quality less the tolerance."""
    lowest = {*(rows["dense_quality"] - rows["tolerance"])}
    rows, tolerance = rows[rows["heads_removed"] > 0], rows["tolerance"].max()
    if len(rows):
        ring: dict[str, Any] = {"color": "black", "markersize": 14, "markerfacecolor": "none", "clip_on": False}
        axes.plot(rows[x], rows[QUALITY], "o", label="the most within the tolerance", **ring)
    if len(lowest) == 1:
        label = f"{tolerance:g} below the whole"
        axes.axhline(*lowest, color="black", linestyle=":", linewidth=0.9, label=label)


_HANDLES = WeakKeyDictionary[Legend, Sequence[Any]]()
"""The lines and marks that each legend explains; a legend itself keeps only copies."""


def legend_above(figure: Figure | SubFigure, of: Axes | Sequence[Artist], title: str = "") -> None:
    """Draw a legend above all panels, in as many columns as fit the figure, below a title of the figure. The title of
    an only panel becomes that of the figure."""
    handles = of.get_legend_handles_labels()[0] if isinstance(of, Axes) else list(of)
    if not handles:
        return
    if isinstance(of, Axes) and not title and figure.axes == [of]:
        title = " ".join(of.get_title().split())
        of.set_title("")
    room = figure.bbox.width / figure.dpi  # inches
    labels = [wrapped(str(handle.get_label()), room - 1.0) for handle in handles]
    width = 0.6 + 0.085 * max(len(line) for label in labels for line in label.splitlines() or [""])
    columns = max(1, int(room / width))
    place: Any = {"loc": "outside upper center", "ncols": columns_of(len(labels), columns), "title_fontsize": 11}
    place |= {"title": wrapped(title, 0.9 * room)} if title else {}
    _HANDLES[figure.legend(handles, labels, **place)] = handles


def number(value: float, decimals: int) -> str:
    """Return a number as text, with a real minus sign but no “−0”; a dash for NaN."""
    return "–" if np.isnan(value) else f"{round(value, decimals) + 0.0:.{decimals}f}".replace("-", "−")


def amount(value: float, decimals: int = 3) -> str:
    """Return an amount as text, and one too small for these decimals as `<0.001`, so that 0 means nothing at all."""
    small = 10.0**-decimals
    if 0 < abs(value) < small:
        return f"<{small:.{decimals}f}"
    return "0" if value == 0 else number(value, decimals)


def wrapped(words: str, inches: float) -> str:
    """Return the words in lines of at most this width, at the size of a title; too long a word is broken, at a hyphen
    if it has one."""
    width = max(int(inches / 0.085), 6)
    parts = words.replace(" %", "\u00a0%").split(" ")
    parts = [part.replace("-", f"-{BREAK} ") if len(part) > width else part for part in parts]
    filled = textwrap.fill(" ".join(parts), width, break_on_hyphens=False)
    return filled.replace(f"{BREAK} ", "").replace(BREAK, "")


def elided(name: str, most: int = 28) -> str:
    """Return a name of at most `most` letters: a longer name loses its middle, because long names differ at their
    ends."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[len(name) - (most - 1) // 2 :]}"


def plain_ticks(axis: XAxis | YAxis) -> None:
    """Write the numbers of a logarithmic axis as 0.01 and 10, not as powers of ten."""
    axis.set_major_formatter(_plain)


def _plain(value: float, place: float) -> str:
    return f"{value:g}".replace("-", "−")


def scale_in_ratios(axis: XAxis | YAxis, low: float, high: float, apart: float = 0.12) -> None:
    """Make an axis logarithmic from `low` to `high`, with a few plain numbers as ticks: `1.5`, not a power of ten. The
    distance between two ticks is at least the share `apart` of the axis, so that their numbers do not touch."""
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
