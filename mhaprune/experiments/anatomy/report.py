"""The report of `experiment=anatomy`: a call of the attention layer in its real numbers, with and without √d_head."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mhaprune.heads import HeadId, block_label
from mhaprune.reporting.heat_map import MATTERS, MISSING, VALUES, frame, heat_map, write_cells
from mhaprune.reporting.plots import COLOURS, MARKERS, Plot, amount, legend_above, needs, number
from mhaprune.tables import HEAD, Tables

LAYOUT = (
    ("query input", "queries", "queries, split"),
    ("key input", "keys", "keys, split"),
    ("value input", "values", "values, split"),
    ("scores", "scaled scores", "masked scores", "weights"),
    ("head outputs", "gate", "gated outputs"),
    ("merged heads", "output"),
)
"""The rows of the figure. Each row has the names of the steps that it shows, from left to right."""
COLOURS_OF = {"scaled scores": "scores", "masked scores": "scores", "head outputs": "gated outputs"}
"""Names of steps, each with the step whose colours it shares, so that the effect of a division or a gate is visible."""


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences: which call was followed, and what the division by √d_head does."""
    head, example = HeadId(*tables["values"].iloc[0][HEAD]), tables["examples"].iloc[0]
    yield (
        f"One call of the layer of {head} in {tables['tensors']['step'].max()} steps, while the model answers"
        f" {example['source']} with {example['answer']}: every tensor with its formula, its shape and its numbers."
    )
    scaling = tables["scaling"].set_index(["head_dim", "scaled"])
    largest, two = tables["scaling"]["head_dim"].max(), partial(amount, decimals=2)
    means = [scaling.loc[(largest, scaled), ["entropy_mean", "gradient_mean"]].map(two) for scaled in (True, False)]
    yield (
        f"Dividing scores by √d_head keeps softmax soft: with random queries at d_head {largest} the entropy of its"
        f" weights is {means[0]['entropy_mean']} nats on average with it and {means[1]['entropy_mean']} without, the"
        f" norm of its derivative {means[0]['gradient_mean']} with it and {means[1]['gradient_mean']} without."
    )


@needs("values")
def life_of_the_tensors(tables: Tables) -> Plot:
    """Draw every tensor of one call as a picture of its numbers, with its formula and its shape."""
    values, steps = tables["values"], tables["tensors"].set_index("tensor")
    head = values.iloc[0]
    pictures = {
        step: cells.pivot(index="row", columns="column", values="value") for step, cells in values.groupby("step")
    }
    matrices = {name: pictures[step].to_numpy(float) for name, step in steps["step"].items()}
    matrices["weights"] = np.where(np.isneginf(matrices["masked scores"]), np.nan, matrices["weights"])
    head_dim = matrices["queries, split"].shape[1]
    columns = max(map(len, LAYOUT))
    figure = Figure(figsize=(2.6 * columns, 1.75 * len(LAYOUT)))
    grid: Any = figure.subplots(len(LAYOUT), columns, squeeze=False)
    for names, line in zip(LAYOUT, grid, strict=True):
        for axes in line[len(names) :]:
            axes.remove()
        for name, axes in zip(names, line, strict=False):
            step, matrix = steps.loc[name], matrices[name]
            colours = around_zero(matrices[COLOURS_OF.get(name, name)])
            if name == "weights":
                colours = {"cmap": MATTERS, "vmin": 0, "vmax": 1}
            axes.set_facecolor(MISSING)
            image = heat_map(axes, np.where(np.isfinite(matrix), matrix, np.nan), **colours)
            if matrix.size == 1:
                write_cells(axes, image, matrix, partial(number, decimals=2), 14)
            if name == "weights":
                write_cells(axes, image, three_values(matrix), partial(number, decimals=2))
            frame(axes)
            if "H·K" in step["axes"]:  # a frame around the columns of the head
                look: Any = {"fill": False, "edgecolor": COLOURS[0], "linewidth": 2, "clip_on": False}
                axes.add_patch(Rectangle((head["place"] * head_dim - 0.5, -0.5), head_dim, len(matrix), **look))
            axes.set_title(f"{step['step']}. {name}", loc="left", fontweight="bold")
            axes.set_xlabel(f"{step['formula']}\n{step['axes']} = {step['shape']}", fontsize=9, loc="left")
    block = block_label(head["site"], head["layer"])
    figure.suptitle(f"One call of {block}, as head {head['head']} goes through it", fontsize=12)
    caption = (
        f"The life of the tensors: one real call of {block}, the first example of the batch and, once the heads are"
        f" apart, head {head['head']} (framed before). Rows are positions, columns features or, of scores and weights,"
        " keys; where the example ends, padding follows. Orange is positive, purple negative, each picture in its own"
        " scale but 10 to 12 in one and 14 and 16 in one; weights are blue, from 0 to 1, three are written;"
        " grey is where attention is forbidden. Shapes are in symbols and numbers: B examples, T"
        f" queries, U keys, H heads of size K (here H·K = {len(matrices['queries'][0]) // head_dim} × {head_dim} ="
        f" {len(matrices['queries'][0])}), model width D, inputs of width qdim, kdim and vdim."
    )
    return Plot("tensors", caption, figure)


def three_values(matrix: np.ndarray) -> np.ndarray:
    """Return the largest number of three rows, far enough from each other and from the edge to be written; NaN
    elsewhere."""
    rows, edge = [len(matrix) * i // 6 for i in (1, 3, 5)], int(matrix.shape[1] > 4)
    place = rows, edge + np.nanargmax(matrix[rows, edge : matrix.shape[1] - edge], axis=1)
    kept = np.full_like(matrix, np.nan)
    kept[place] = matrix[place]
    return kept


def around_zero(matrix: np.ndarray) -> dict[str, Any]:
    """Return a colour scale with 0 in the middle, so that the colour shows the sign of a number."""
    largest = float(np.abs(matrix[np.isfinite(matrix)]).max(initial=0.0)) or 1.0
    largest *= 3 if matrix.size == 1 else 1  # paler, so that a written number can be read
    return {"cmap": VALUES, "vmin": -largest, "vmax": largest}


@needs("scaling")
def scaling(tables: Tables) -> Plot:
    """Draw entropy and gradient of softmax against d_head, with and without the division."""
    table = tables["scaling"]
    figure = Figure(figsize=(9.6, 3.4))
    entropy, gradient = figure.subplots(1, 2)
    for axes, column, what in (
        (entropy, "entropy", "entropy of the weights (nats)"),
        (gradient, "gradient", "norm of softmax's derivative"),
    ):
        for i, name in enumerate(("divided by √d_head", "not divided")):
            curve = table[table["scaled"] == (i == 0)]
            axes.plot(curve["head_dim"], curve[column], MARKERS[i], ls="-", color=COLOURS[i], label=name)
            ends = curve[f"{column}_q1"], curve[f"{column}_q3"]
            axes.fill_between(curve["head_dim"], *ends, color=COLOURS[i], alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="d_head", ylabel=what, ylim=(0, None))
        axes.set_xticks(table["head_dim"].unique(), table["head_dim"].unique())
    keys = int(table["num_keys"].iloc[0])
    entropy.axhline(np.log(keys), color="black", linestyle=":", linewidth=1, label=f"all {keys} keys alike")
    legend_above(figure, entropy, "Without the division wide heads look at one key, and little can be learned from it")
    caption = (
        "Why scores are divided by √d_head. With components drawn from a standard normal distribution, scores spread by"
        " √d_head. If they are not divided, softmax gives nearly all weight to one key, and its gradient is nearly 0."
        f" Medians and quartiles of {table['draws'].iloc[0]} queries."
    )
    return Plot("scaling", caption, figure)
