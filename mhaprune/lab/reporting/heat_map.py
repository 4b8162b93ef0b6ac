"""A matrix of numbers as colours, with the numbers in the cells; and the meaning of colours in every figure.

Blue means important, red means lost, white means neither. All maps grow darker from white, so they can be read in grey
print. Signed maps differ only by hue there, so their figures also write the sign, or explain it at the colour bar.
"""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.image import AxesImage

MATTERS = "Blues"
"""Darker means more: how much a head matters, or how much it attends."""
LOST = LinearSegmentedColormap.from_list("lost", ["white", *matplotlib.colormaps["Reds"](np.linspace(0.25, 1, 8))])
"""Darker means that a choice of heads loses more quality; nothing lost is white."""
NEEDED_OR_HURT = "RdBu"
"""Blue is needed, red hurts, and both grow darker from white."""
MISSING = "#d9d9d9"
"""The colour of a cell without a number: a removed head, no measurement, a place where attention is forbidden."""


def heat_map(
    axes: Axes,
    values: np.ndarray,
    *,
    rows: Sequence[object] = (),
    columns: Sequence[object] = (),
    write: Callable[[float], str] | None = None,
    written: np.ndarray | None = None,
    **colours: Any,
) -> AxesImage:
    """Draw `values` as colours with row and column names (empty names are left out) and, with `write`, numbers.

    The cells show the numbers `written`, by default the values. `colours` are passed to `imshow`. NaN is grey.
    """
    image = axes.imshow(values, **{"cmap": MATTERS, "aspect": "auto", "interpolation": "nearest", **colours})
    if np.isnan(values).any():
        axes.set_facecolor(MISSING)
    if write is not None:
        write_cells(axes, image, values if written is None else written, write)
    for set_ticks, names in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
        named = {i: str(name) for i, name in enumerate(names) if str(name)}
        set_ticks(list(named), list(named.values()))
    axes.grid(visible=False)
    return image


def write_cells(axes: Axes, image: AxesImage, values: np.ndarray, write: Callable[[float], str]) -> None:
    """Write a number in every cell of a heat map, black on light and white on dark; NaN is left empty."""
    shades = np.asarray(image.to_rgba(np.ma.asarray(image.get_array())))[..., :3] @ (0.3, 0.59, 0.11)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "black" if shades[row, column] > 0.45 else "white"
            write_inside(axes, column, row, write(value), fontsize=9, color=colour)


def write_inside(axes: Axes, x: float, y: float, words: str, **style: Any) -> None:
    """Write words in the middle of a cell. They are left out of the layout, which would be slow with so many texts."""
    axes.text(x, y, words, ha="center", va="center", **style).set_in_layout(False)


def thinned(names: Sequence[object], most: int) -> list[str]:
    """Return the names for an axis with room for `most`: if there are more, only every second, third, ... is kept."""
    step = max(1, -(-len(names) // max(most, 1)))
    return [str(name) if i % step == 0 else "" for i, name in enumerate(names)]


def frame(axes: Axes) -> None:
    """Draw a thin frame around a picture without ticks."""
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set(visible=True, color="#999999", linewidth=0.6)
