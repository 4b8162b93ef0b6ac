"""The layer as one picture: project, split, attend, gate, merge, in the numbers of one real call."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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


def schematic(tables: Tables) -> Plot | None:
    """From the wide projections at the left, through a row per head, to the merged heads at the right."""
    if "heads_here" not in tables or "values" not in tables:
        return None
    values, here = tables["values"], tables["heads_here"]
    steps = tables["tensors"].drop_duplicates("tensor").set_index("tensor")["step"]

    def tensor(name: str) -> np.ndarray:
        cells = values[values["step"] == steps[name]]
        return cells.pivot(index="row", columns="column", values="value").to_numpy(float)

    count = int(here["place"].max()) + 1
    shown = min(count, MOST_HEADS)
    wide = {name: tensor(name) for name in (*WIDE, "merged heads", "output")}
    size = wide["queries"].shape[1] // count
    figure = Figure(figsize=(sum(WIDTHS) + 1, 1.3 + max(1.15 * shown, 3.4)))
    spec = figure.add_gridspec(6 * shown, len(WIDTHS), width_ratios=WIDTHS)
    parts = (0, 2 * shown, 4 * shown, 6 * shown)
    left = [figure.add_subplot(spec[parts[i] : parts[i + 1], 0]) for i in range(3)]
    right = [figure.add_subplot(spec[3 * i * shown : 3 * (i + 1) * shown, 5]) for i in range(2)]
    for axes, name in zip((*left, *right), wide, strict=True):
        _picture(axes, wide[name])
        axes.set_ylabel(f"{name}\n{_shape(wide[name])}", fontsize=9)
        axes.yaxis.set_label_position("right" if axes in right else "left")
        for n in range(count if name != "output" else 0):
            edge: Any = {"fill": False, "edgecolor": COLOURS[n % len(COLOURS)], "linewidth": 2, "clip_on": False}
            axes.add_patch(Rectangle((n * size - 0.5, -0.5), size, len(wide[name]), **edge))
    highest = max(float(here["gate_value"].max()), 1.0)
    rows = []
    for n in range(shown):
        row = [figure.add_subplot(spec[6 * n : 6 * (n + 1), column]) for column in range(1, 5)]
        own, part = here[here["place"] == n], slice(n * size, (n + 1) * size)
        split, attend, gate, out = row
        _picture(split, _beside(*(wide[name][:, part] for name in WIDE)))
        weights = own.pivot(index="query", columns="key", values="weight").to_numpy(float)
        _picture(attend, weights, WEIGHTS)
        opened = float(own["gate_value"].iloc[0])
        _gate(gate, opened, opened / highest)
        _picture(out, wide["merged heads"][:, part])
        for axes in (split, attend, out):
            axes.spines[:].set(color=COLOURS[n % len(COLOURS)], linewidth=1.6)
        split.set_ylabel(f"head {int(own['head'].iloc[0])}", fontsize=9.5)
        rows.append(row)
    split, attend, _, out = rows[-1]
    split.set_xlabel(f"queries, keys, values:\n{len(wide['queries'])} × {size} each", fontsize=9)
    attend.set_xlabel(f"weights:\n{_shape(weights)}", fontsize=9)
    out.set_xlabel(f"gate × output:\n{len(wide['merged heads'])} × {size}", fontsize=9)
    titles = ("1. project", "2. split", "3. attend", "4. gate", "5. result", "6. merge, project")
    for axes, title in zip((left[0], *rows[0], right[0]), titles, strict=True):
        axes.set_title(title, fontweight="bold", fontsize=10)
    block = block_label(values["site"].iloc[0], values["layer"].iloc[0])
    figure.suptitle(f"{count} head{'s' * (count > 1)} of {block}: one call, in real numbers", fontsize=12)
    rest = f" The first {shown} of {count} heads are shown." if shown < count else ""
    caption = (
        f"Multi-head attention as it is computed: one wide projection holds all {count} heads side by side (frames in"
        f" their colours); split, each attends on its own, with {size} of {size * count} columns; its output is"
        " multiplied by its gate, all are put side by side again and projected once more. Orange is positive, purple"
        " negative, each picture in its own scale; blue are attention weights, from 0 to 1; grey is where attention is"
        f" forbidden. All numbers are those of the first example of one call of {block}.{rest}"
    )
    return Plot("schematic", caption, figure)


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
