"""A call of the attention layer in its real numbers: step by step, as one picture, and with and without √d_head."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec, SubplotSpec
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from mhaprune.heads import HeadId, block_label
from mhaprune.reporting.heat_map import MATTERS, MISSING, VALUES, WEIGHTS, frame, heat_map, write_cells
from mhaprune.reporting.labels import SIGNS
from mhaprune.reporting.plots import COLOURS, MARKERS, Plot, legend_above, needs, number
from mhaprune.tables import HEAD, Tables

LAYOUT = (
    ("query input", "queries", "queries, split"),
    ("key input", "keys", "keys, split"),
    ("value input", "values", "values, split"),
    ("scores", "scaled scores", "masked scores", "weights"),
    ("head outputs", "gate", "gated outputs"),
    ("merged heads", "output"),
)
"""The steps of a call as rows of a figure, in the order of their making."""
SAME_SCALE = (("scores", "scaled scores", "masked scores"), ("gated outputs", "head outputs"))
"""Steps whose pictures share the colours of the first, so that what is divided or gated can be seen."""
FORBIDDEN: Any = {"facecolor": MISSING, "edgecolor": "#888888", "hatch": "////", "linewidth": 0}
"""The look of cells where attention is forbidden."""


@needs("values")
def life_of_the_tensors(tables: Tables) -> Plot:
    """Every tensor of one call as a picture of its numbers, with its formula and its shape."""
    values, steps = tables["values"], tables["tensors"]
    steps = steps[steps["call"] == steps["call"].iloc[0]].set_index("tensor")
    head = values.iloc[0]
    head_dim = int(values.loc[values["step"] == steps.loc["queries, split", "step"], "column"].max()) + 1
    by_step = {
        step: cells.pivot(index="row", columns="column", values="value") for step, cells in values.groupby("step")
    }
    matrices = {name: by_step[step].to_numpy(float) for name, step in steps["step"].items()}
    scales = {name: _scale(matrices[first]) for first, *others in SAME_SCALE for name in (first, *others)}
    forbidden = np.isneginf(matrices["masked scores"])
    columns = max(map(len, LAYOUT))
    figure = Figure(figsize=(2.75 * columns, 1.75 * len(LAYOUT)))
    grid: Any = figure.subplots(len(LAYOUT), columns, squeeze=False)
    images = {}
    for names, line in zip(LAYOUT, grid, strict=True):
        for axes in line[len(names) :]:
            axes.remove()
        for name, axes in zip(names, line, strict=False):
            step, matrix = steps.loc[name], matrices[name]
            shown = np.where(forbidden, np.nan, matrix) if name == "weights" else matrix
            colours: Any = WEIGHTS if name == "weights" else {"cmap": VALUES, **around_zero(scales.get(name, matrix))}
            images[name] = _picture(axes, shown, colours)
            if "H·K" in step["axes"]:
                left, size = head["place"] * head_dim - 0.5, (head_dim, len(matrix))
                axes.add_patch(
                    Rectangle((left, -0.5), *size, fill=False, edgecolor=COLOURS[0], linewidth=2, clip_on=False)
                )
            axes.set_title(f"{step['step']}. {name}", loc="left", fontweight="bold")
            axes.set_xlabel(f"{step['formula']}\n{step['axes']} = {step['shape']}", fontsize=9, loc="left")
    _explain_colours(
        figure.add_subplot(len(LAYOUT), columns, (columns * len(LAYOUT) - 1, columns * len(LAYOUT))), images
    )
    site, layer, number_ = head["site"], head["layer"], head["head"]
    figure.suptitle(f"One call of {block_label(site, layer)}, as head {number_} goes through it", fontsize=12)
    caption = (
        f"The life of the tensors: one real call of {block_label(site, layer)}, the first example of the batch and,"
        f" once the heads are apart, head {number_} (framed before). Rows are positions, columns features or, of scores"
        " and weights, keys; where the example ends, padding follows. Orange is positive, purple negative,"
        " each picture in its own scale but 10 to 12 in one and 14 and 16 in one; weights are blue, from 0 to 1;"
        " hatched is where attention is forbidden. Under each its formula and"
        " its shape, in symbols and in numbers: B examples, T queries, U keys, H heads of size K, model width D, inputs"
        " of width qdim, kdim and vdim."
    )
    return Plot("tensors", caption, figure)


def _picture(axes: Axes, matrix: np.ndarray, colours: dict[str, Any]) -> AxesImage:
    """The numbers of a matrix as colours, a single one as a number; hatched where there is none."""
    axes.set_facecolor(MISSING)
    if (hidden := ~np.isfinite(matrix)).any():
        first = int(hidden.any(axis=0).argmax()) - 0.5
        place = (first, -0.5), matrix.shape[1] - 0.5 - first, len(matrix)
        axes.add_patch(Rectangle(*place, zorder=0, **FORBIDDEN))
    image = heat_map(axes, np.where(hidden, np.nan, matrix), **colours)
    if matrix.size == 1:
        write_cells(axes, image, matrix, partial(number, decimals=2), 14)
    frame(axes)
    return image


def _explain_colours(axes: Axes, images: Mapping[str, AxesImage]) -> None:
    """Two colour bars, one for numbers of either sign and one for weights, and the sign of what is forbidden."""
    axes.set_axis_off()
    bars = (
        ("query input", "numbers: each picture has its own ends", ["−largest", "0", "+largest"], 0.72),
        ("weights", "weights: all of a row add up to 1", ["0", "0.5", "1"], 0.2),
    )
    for name, title, labels, height in bars:
        low, high = images[name].get_clim()
        bar = axes.figure.colorbar(
            images[name], cax=axes.inset_axes((0.1, height, 0.6, 0.12)), orientation="horizontal"
        )
        bar.set_ticks([low, (low + high) / 2, high], labels=labels)
        bar.ax.set_title(title, fontsize=9, loc="left")
        bar.ax.tick_params(length=0, labelsize=9)
    axes.add_patch(Rectangle((0.8, 0.2), 0.08, 0.12, **FORBIDDEN))
    axes.text(0.9, 0.26, "forbidden", fontsize=9, va="center")


def _scale(matrix: np.ndarray) -> np.ndarray:
    return matrix[np.isfinite(matrix)]


def around_zero(matrix: np.ndarray) -> dict[str, float]:
    """The ends of a colour scale with 0 in its middle, so that the colour shows the sign."""
    largest = float(np.abs(_scale(matrix)).max(initial=0.0)) or 1.0
    largest *= 3 if matrix.size == 1 else 1  # a number alone is read, not seen
    return {"vmin": -largest, "vmax": largest}


@needs("scaling")
def scaling(tables: Tables) -> Plot:
    """The scores and weights of one query with and without the division, and entropy and gradient against d_head."""
    here, table = tables["scaling_here"], tables["scaling"]
    figure = Figure(figsize=(9.6, 5.8))
    (before, after), (entropy, gradient) = figure.subplots(2, 2)
    head = here.iloc[0]
    names = ("divided by √d_head", "not divided")
    x = np.arange(len(here))
    for axes, what, columns in (
        (before, "score, before softmax", ("score", "score_unscaled")),
        (after, "weight, after softmax", ("weight", "weight_unscaled")),
    ):
        for i, (column, name) in enumerate(zip(columns, names, strict=True)):
            bars: Any = {"color": COLOURS[i], "label": name, "hatch": "//" if i else "", "edgecolor": "white"}
            axes.bar(x + 0.4 * (i - 0.5), here[column], 0.4, **bars)
        axes.set(xlabel="key", ylabel=what)
        words = here["looks_at"].astype(str).replace(SIGNS)
        axes.set_xticks(x, words, rotation=90 if words.str.len().max() > 1 else 0)
        axes.grid(visible=False, axis="x")
    after.set_ylim(0, 1.03)
    where = f"at query {head['query']}, “{SIGNS.get(str(head['token']), head['token'])}”"
    before.set_title(f"{HeadId(*head[HEAD]).label}, {where}", loc="left")
    after.set_title("the same query", loc="left")
    for axes, column, what in (
        (entropy, "entropy", "entropy of the weights (nats)"),
        (gradient, "gradient", "norm of softmax's derivative"),
    ):
        for i, (scaled, name) in enumerate(zip((True, False), names, strict=True)):
            curve = table[table["scaled"] == scaled]
            axes.plot(curve["head_dim"], curve[column], MARKERS[i], ls="-", color=COLOURS[i], label=name)
            axes.fill_between(
                curve["head_dim"],
                curve[f"{column}_q1"],
                curve[f"{column}_q3"],
                color=COLOURS[i],
                alpha=0.15,
                linewidth=0,
            )
        axes.set_xscale("log", base=2)
        axes.set(xlabel="d_head", ylabel=what, ylim=(0, None))
        axes.set_xticks(table["head_dim"].unique(), table["head_dim"].unique())
    keys = int(table["num_keys"].iloc[0])
    entropy.axhline(np.log(keys), color="black", linestyle=":", linewidth=1)
    entropy.text(
        table["head_dim"].max(), 1.03 * np.log(keys), f"all {keys} keys alike", ha="right", va="bottom", fontsize=9
    )
    entropy.set_ylim(0, 1.2 * np.log(keys))
    entropy.set_title("random queries and keys", loc="left")
    gradient.set_title("random queries and keys", loc="left")
    legend_above(figure, entropy)
    caption = (
        "Why scores are divided by √d_head. Above: the scores and weights of one query of"
        f" {HeadId(*head[HEAD]).label} on the example, with and without the division."
        " Below: with components drawn from a standard normal distribution, scores spread by √d_head; undivided,"
        " softmax gives all to one key, and what it passes back goes to 0. Medians and quartiles of"
        f" {table['draws'].iloc[0]} queries."
    )
    return Plot("scaling", caption, figure)


MOST_HEADS = 6
"""Heads with a row each."""
WIDTHS = (2.6, 2.2, 1.3, 0.8, 1.1, 2.6)
"""Of the columns, in inches."""
WIDE = ("queries", "keys", "values")
MERGED = ("merged heads", "output")
TITLES = ("1. project", "2. split", "3. attend", "4. gate", "5. result", "6. merge, project")


@needs("heads_here", "values")
def schematic(tables: Tables) -> Plot:
    """From the wide projections at the left, through a row per head, to the merged heads at the right."""
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
    """Return the tensors that hold all heads side by side, and the output."""
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
    """Draw the tensors that hold all heads, with a frame around the columns of each."""
    for axes, (name, matrix) in zip((*left, *right), wide.items(), strict=True):
        _small_picture(axes, matrix)
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
    _small_picture(split, _beside(*(wide[name][:, part] for name in WIDE)))
    _small_picture(attend, own.pivot(index="query", columns="key", values="weight").to_numpy(float), WEIGHTS)
    opened = float(own["gate_value"].iloc[0])
    _gate(gate, opened, opened / max(float(here["gate_value"].max()), 1.0))
    _small_picture(out, wide["merged heads"][:, part])
    for axes in (split, attend, out):
        axes.spines[:].set(color=COLOURS[n % len(COLOURS)], linewidth=1.6)
    split.set_ylabel(f"head {int(own['head'].iloc[0])}", fontsize=9.5)


def _shapes(wide: Mapping[str, np.ndarray], here: pd.DataFrame, count: int) -> tuple[str, ...]:
    """Return the texts below the columns of a head."""
    size = wide["queries"].shape[1] // count
    weights = f"{here['query'].nunique()} × {here['key'].nunique()}"
    return (
        f"queries, keys, values:\n{len(wide['queries'])} × {size} each",
        f"weights:\n{weights}",
        "",
        f"gate × output:\n{len(wide['merged heads'])} × {size}",
    )


def _small_picture(axes: Axes, matrix: np.ndarray, colours: dict[str, Any] | None = None) -> None:
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
