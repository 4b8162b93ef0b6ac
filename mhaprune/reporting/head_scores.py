"""The scores of all heads, in colours that are the same for every scorer: by rank."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from mhaprune.heads import block_label
from mhaprune.reporting.heat_map import bar_in_words, heat_map, thinned
from mhaprune.reporting.plots import Plot, columns_of, elided, panels, short, wrapped
from mhaprune.tables import BLOCK, HEAD, Tables, blocks_in, candidates

MOST_PANELS = 6
"""Scorers with a panel each. More become the columns of one matrix, in which they can be compared."""
CELL = 0.44, 0.3
"""Inches: the width and height of a cell with a number."""
TALLEST, WIDEST = 11.0, 13.0
"""Inches. With more heads than fit, cells shrink and lose their numbers."""
COLOURS: Any = {"vmin": -0.12, "vmax": 1}
"""The least of all heads still has a colour, unlike one that is not there."""
BAR = "rank of the head", "matters\nleast", "matters\nmost"
CAPTION = " The colour is the rank of a head: the darker, the more it matters to that scorer."


def head_scores(tables: Tables) -> Plot | None:
    """Every head's rank by every scorer: a map of the model for each scorer or, for many of them, one matrix."""
    heads = tables.get("heads", pd.DataFrame(columns=["scorer", "draw"]))
    names = candidates(heads)
    if not names:
        return None
    heads = heads[heads["scorer"].isin(names)]
    scores = heads.groupby("scorer")["score"]
    others = (scores.transform("count") - 1).replace(0, np.nan)
    missing = " Grey: no score." if heads["score"].isna().any() else ""
    heads = heads.assign(depth=((scores.rank() - 1) / others).fillna(0.5).where(heads["score"].notna()))
    plot = _maps(heads, names) if len(names) <= MOST_PANELS else _matrix(heads, names)
    return replace(plot, caption=plot.caption + missing)


def _maps(heads: pd.DataFrame, names: list[str]) -> Plot:
    """A panel per scorer: site and layer × head, with the scores as numbers where they fit."""
    rows, heads_of_row = blocks_in(heads), sorted(heads["head"].unique())
    columns = columns_of(len(names), max(1, min(4, int(WIDEST / (0.3 + CELL[0] * len(heads_of_row))))))
    lines = -(-len(names) // columns)
    width = max(min(CELL[0] * len(heads_of_row), WIDEST / columns), 1.75)
    height = max(min(CELL[1] * len(rows), TALLEST / lines), 0.6)
    fits = width / len(heads_of_row) > 0.9 * CELL[0] and height / len(rows) > 0.7 * CELL[1]
    figure = Figure(figsize=(2.2 + (width + 0.15) * columns, 0.5 + (0.5 + height) * lines))
    grid = panels(figure, len(names), columns, "head")
    for axes, name in zip(grid, names, strict=True):
        own = heads[heads["scorer"] == name]
        depths, scores = (
            own.pivot_table(index=BLOCK, columns="head", values=column).reindex(index=rows, columns=heads_of_row)
            for column in ("depth", "score")
        )
        image = heat_map(
            axes,
            depths.to_numpy(float),
            rows=thinned([block_label(*row) for row in rows], int(height / 0.16)),
            columns=thinned(heads_of_row, int(width / 0.25)),
            write=short if fits else None,
            written=scores.to_numpy(float),
            **COLOURS,
        )
        axes.set_title(wrapped(name, width))
        if depths.isna().all(axis=None):
            axes.text(0.5, 0.5, "no scores", ha="center", va="center", transform=axes.transAxes)
    bar_in_words(image, grid, *BAR)
    caption = "Importance of every head, by its site and layer, one panel for each scorer."
    written = " The numbers are the scores; 4e−5 stands for 0.00004." if fits else ""
    return Plot("heads", caption + CAPTION + written, figure)


def _matrix(heads: pd.DataFrame, names: list[str]) -> Plot:
    """One row per head, one column per scorer."""
    depths = heads.pivot_table(index=HEAD, columns="scorer", values="depth", sort=False)
    every = pd.MultiIndex.from_frame(heads[HEAD].drop_duplicates())  # also a head that no scorer has a number for
    depths = depths.reindex(index=every, columns=names)
    blocks = [block_label(site, layer) for site, layer, _ in depths.index]
    height = max(min(0.19 * len(depths), TALLEST), 1.8)
    shown = [elided(str(name), 24) for name in depths]
    figure = Figure(figsize=(3.2 + 0.27 * len(names), 1.5 + height + 0.085 * max(0, max(map(len, shown)) - 18)))
    axes = figure.add_subplot()
    first = [i for i, block in enumerate(blocks) if i == 0 or blocks[i - 1] != block]
    image = heat_map(axes, depths.to_numpy(float), columns=shown, **COLOURS)
    axes.tick_params(axis="x", rotation=90)
    named = thinned([blocks[i] for i in first], int(height / 0.16))
    axes.set_yticks(np.add(first, [*first[1:], len(blocks)]) / 2 - 0.5, named)
    axes.tick_params(axis="y", length=0)
    for i in first[1:]:
        axes.axhline(i - 0.5, color="black", linewidth=0.6)
    axes.set(xlabel="scorer", ylabel="a row per head")
    bar_in_words(image, [axes], *BAR)
    caption = "Importance of every head by every scorer: a row per head, a column per scorer."
    return Plot("heads", caption + CAPTION, figure)
