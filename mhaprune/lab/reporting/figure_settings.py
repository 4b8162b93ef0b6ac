"""The options `figure.` of figure files, for papers and slides. They change no result."""

from dataclasses import dataclass
from typing import Annotated, Literal

from mhaprune.settings.ranges import Checked, Distinct, Within


@dataclass(frozen=True)
class FigureSettings(Checked):
    """The form and size of the figures in a run folder and in collected runs. A page always shows SVG."""

    format: Annotated[tuple[Literal["svg", "png", "pdf"], ...], Distinct()] = ("svg", "png")
    """The kinds of file that are written of each figure."""
    width: Annotated[float | None, Within(2, 40)] = None
    """The width of each figure in inches; the height follows, and letters keep their size in points. None means the
    width at which each figure is read best."""
    dpi: Annotated[int, Within(50, 1200)] = 150
    """Dots per inch of PNG files."""
