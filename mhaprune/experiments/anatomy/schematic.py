"""The layer as one picture: project, split, attend, gate, merge, in the numbers of one real call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec, SubplotSpec
from matplotlib.patches import Rectangle

from mhaprune.experiments.anatomy.figures import around_zero
from mhaprune.reporting.colours import MATTERS, VALUES, WEIGHTS
from mhaprune.reporting.heat_map import frame, heat_map
from mhaprune.reporting.plots import COLOURS, Plot, number
from mhaprune.tables import Tables, block_label

MOST_HEADS = 6
"""Heads with a row each."""
WIDTHS = (2.6, 2.2, 1.3, 0.8, 1.1, 2.6)
"""Of the columns, in inches."""
WIDE = ("queries", "keys", "values")
MERGED = ("merged heads", "output")
TITLES = ("1. project", "2. split", "3. attend", "4. gate", "5. result", "6. merge, project")


def schematic(tables: Tables) -> Plot | None:
    """From the wide projections at the left, through a row per head, to the merged heads at the right."""
    if "heads_here" not in tables or "values" not in tables:
        return None
    here, values = tables["heads_here"], tables["values"]
    wide, count = _matrices(tables), int(here["place"].max()) + 1
    shown = min(count, MOST_HEADS)
    figure = Figure(figsize=(sum(WIDTHS) + 1, 1.3 + max(1.15 * shown, 3.4)))
    grid = figure.add_gridspec(6 * shown, len(WIDTHS), width_ratios=WIDTHS)  # 6: for two or three pictures in a column
    left, right = (
        [figure.add_subplot(part) for part in _column(grid, place, parts)] for place, parts in ((0, 3), (5, 2))
    )
    _draw_wide(left, right, wide, count)
    rows = [[figure.add_subplot(_column(grid, place, shown)[n]) for place in range(1, 5)] for n in range(shown)]
    for n, row in enumerate(rows):
        _draw_head(row, wide, here, n, count)
    for axes, title in zip((left[0], *rows[0], right[0]), TITLES, strict=True):
        axes.set_title(title, fontweight="bold", fontsize=10)
    for axes, text in zip(rows[-1], _shapes(wide, here, count), strict=True):
        axes.set_xlabel(text, fontsize=9)
    block = block_label(values["site"].iloc[0], values["layer"].iloc[0])
    figure.suptitle(f"{count} head{'s' * (count > 1)} of {block}: one call, in real numbers", fontsize=12)
    size = wide["queries"].shape[1] // count
    rest = f" The first {shown} of {count} heads are shown." if shown < count else ""
    caption = (
        f"Multi-head attention as it is computed: one wide projection holds all {count} heads side by side (frames in"
        f" their colours); split, each attends on its own, with {size} of {size * count} columns; its output is"
        " multiplied by its gate, all are put side by side again and projected once more. Orange is positive, purple"
        " negative, each picture in its own scale; blue are attention weights, from 0 to 1; grey is where attention is"
        f" forbidden. All numbers are those of the first example of one call of {block}.{rest}"
    )
    return Plot("schematic", caption, figure)


def _matrices(tables: Tables) -> dict[str, np.ndarray]:
    """What holds all heads side by side, and the output."""
    values = tables["values"]
    steps = tables["tensors"].drop_duplicates("tensor").set_index("tensor")["step"]
    cells = {name: values[values["step"] == steps[name]] for name in (*WIDE, *MERGED)}
    return {
        name: own.pivot(index="row", columns="column", values="value").to_numpy(float) for name, own in cells.items()
    }


def _column(grid: GridSpec, place: int, parts: int) -> list[SubplotSpec]:
    """A column of the grid in equal parts."""
    size = grid.nrows // parts
    return [grid[size * i : size * (i + 1), place] for i in range(parts)]


def _draw_wide(left: list[Axes], right: list[Axes], wide: Mapping[str, np.ndarray], count: int) -> None:
    """What holds all heads, with a frame around the columns of each."""
    for axes, (name, matrix) in zip((*left, *right), wide.items(), strict=True):
        _picture(axes, matrix)
        axes.set_ylabel(f"{name}\n{_shape(matrix)}", fontsize=9)
        axes.yaxis.set_label_position("right" if axes in right else "left")
        size = matrix.shape[1] // count
        for n in range(count if name != "output" else 0):
            edge: Any = {"fill": False, "edgecolor": COLOURS[n % len(COLOURS)], "linewidth": 2, "clip_on": False}
            axes.add_patch(Rectangle((n * size - 0.5, -0.5), size, len(matrix), **edge))


def _draw_head(row: list[Axes], wide: Mapping[str, np.ndarray], here: pd.DataFrame, n: int, count: int) -> None:
    """One head: its columns of the projections, its weights, its gate, and what is left of its output."""
    split, attend, gate, out = row
    size = wide["queries"].shape[1] // count
    own, part = here[here["place"] == n], slice(n * size, (n + 1) * size)
    _picture(split, _beside(*(wide[name][:, part] for name in WIDE)))
    _picture(attend, own.pivot(index="query", columns="key", values="weight").to_numpy(float), WEIGHTS)
    opened = float(own["gate_value"].iloc[0])
    _gate(gate, opened, opened / max(float(here["gate_value"].max()), 1.0))
    _picture(out, wide["merged heads"][:, part])
    for axes in (split, attend, out):
        axes.spines[:].set(color=COLOURS[n % len(COLOURS)], linewidth=1.6)
    split.set_ylabel(f"head {int(own['head'].iloc[0])}", fontsize=9.5)


def _shapes(wide: Mapping[str, np.ndarray], here: pd.DataFrame, count: int) -> tuple[str, ...]:
    """What stands below the columns of a head."""
    size = wide["queries"].shape[1] // count
    weights = f"{here['query'].nunique()} × {here['key'].nunique()}"
    return (
        f"queries, keys, values:\n{len(wide['queries'])} × {size} each",
        f"weights:\n{weights}",
        "",
        f"gate × output:\n{len(wide['merged heads'])} × {size}",
    )


def _picture(axes: Axes, matrix: np.ndarray, colours: dict[str, Any] | None = None) -> None:
    look: Any = colours or {"cmap": VALUES, **around_zero(matrix)}
    heat_map(axes, np.where(np.isfinite(matrix), matrix, np.nan), **look)
    if colours is None:
        axes.set_facecolor("white")  # between matrices that stand side by side
    frame(axes)


def _gate(axes: Axes, gate: float, share: float) -> None:
    """The gate as a number on a disc, the darker, the more open."""
    axes.set(xlim=(-1, 1), ylim=(-1, 1), xticks=[], yticks=[])
    axes.set_axis_off()
    depth = 0.15 + 0.85 * max(share, 0.0)
    disc: Any = {"marker": "o", "markersize": 34, "markeredgecolor": "#888888", "linestyle": ""}
    axes.plot([0], [0], color=matplotlib.colormaps[MATTERS](depth), **disc)
    ink = "white" if depth > 0.55 else "black"
    axes.text(0, 0, f"× {number(gate, 2)}", ha="center", va="center", fontsize=9, color=ink)


def _beside(*matrices: np.ndarray) -> np.ndarray:
    """Matrices side by side with an empty column between them; shorter ones end earlier."""
    rows = max(map(len, matrices))
    parts = []
    for matrix in matrices:
        parts += [np.pad(matrix, ((0, rows - len(matrix)), (0, 0)), constant_values=np.nan), np.full((rows, 1), np.nan)]
    return np.hstack(parts[:-1])


def _shape(matrix: np.ndarray) -> str:
    return " × ".join(map(str, matrix.shape))
