"""The order in which heads go."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mhaprune.experiments.prune.figures import ways_of
from mhaprune.reporting.heat_map import bar_in_words, heat_map
from mhaprune.reporting.plots import Plot, columns_of, number, panels, wrapped
from mhaprune.tables import BLOCK, Tables, block_label, block_order, blocks_in, head_names


def order_of_removal(tables: Tables) -> Plot | None:
    """At which step every head goes: site and layer × head, a panel per schedule."""
    if "order" not in tables:
        return None
    order = tables["order"]
    rows = sorted(blocks_in(order), key=lambda block: block_order(*block))
    heads, ways = sorted(order["head"].unique()), list(ways_of(order).unique())
    columns = columns_of(len(ways), 4)
    width = max(0.42 * len(heads), 1.9)
    height = 0.6 + (0.6 + 0.32 * len(rows)) * -(-len(ways) // columns)
    figure = Figure(figsize=(2.2 + width * columns, max(height, 2.0)))  # the bar needs room for its words
    grid = panels(figure, len(ways), columns, "head")
    most = int(order["step"].max())
    for axes, way in zip(grid, ways, strict=True):
        steps = order[ways_of(order) == way].pivot_table(index=BLOCK, columns="head", values="step")
        values = steps.reindex(index=rows, columns=heads).to_numpy(float)
        staying = np.isnan(values) & _present(tables, rows, heads)
        names: Any = {"rows": [block_label(*row) for row in rows], "columns": heads}
        shown = np.where(staying, most + 1.0, values)
        write = partial(_step, last=most)
        image = heat_map(axes, shown, **names, write=write, vmin=0, vmax=most + bool(staying.any()))
        axes.set_title(wrapped(way, width))
    bar_in_words(image, grid, "step at which it goes", "first", "last")
    caption = (
        "The order of removal: the step at which each head goes, 1 first; the darker, the later, and so the more it"
        " matters. A dash: it stays to the end."
    )
    return Plot("order", caption, figure)


def _present(tables: Tables, rows: Sequence[tuple[str, int]], heads: Sequence[int]) -> np.ndarray:
    """Which heads the whole model has: block × head."""
    kept = tables["recovery"]["kept"] if "recovery" in tables else []
    names = {head for cell in set(kept) for head in head_names(cell)}
    return np.array([[(*row, head) in names for head in heads] for row in rows])


def _step(step: float, last: int) -> str:
    return "–" if step > last else number(step, 0)
