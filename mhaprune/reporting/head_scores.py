"""The scores of all heads; the colour is the rank, so that scorers can be compared."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from mhaprune.heads import block_label
from mhaprune.reporting.heat_map import heat_map, thinned
from mhaprune.reporting.plots import Plot, elided, short
from mhaprune.tables import HEAD, Tables, candidates

MOST_NUMBERS = 8
"""Largest number of scorers for which scores are written into the cells."""
TALLEST = 11.0
"""Largest height in inches. With more heads than fit, rows shrink and lose their numbers."""


def head_scores(tables: Tables) -> Plot | None:
    """Draw a row per head and a column per scorer: the rank as a colour and, with enough room, the score."""
    heads = tables.get("heads", pd.DataFrame(columns=["scorer", "draw"]))
    names = candidates(heads)
    if not names:
        return None
    heads = heads[heads["scorer"].isin(names)]
    every = pd.MultiIndex.from_frame(heads[HEAD].drop_duplicates())  # also a head that no scorer has a number for
    scores = heads.pivot_table(index=HEAD, columns="scorer", values="score").reindex(index=every, columns=names)
    others = (scores.count() - 1).replace(0, np.nan)
    depths = ((scores.rank() - 1) / others).fillna(0.5).where(scores.notna())
    height = max(min(0.2 * len(scores), TALLEST), 1.8)
    fits = len(names) <= MOST_NUMBERS and height / len(scores) > 0.17
    shown = [elided(name, 24) for name in names]
    wide = 0.6 if fits else 0.27
    figure = Figure(figsize=(3.2 + wide * len(names), 1.5 + height + 0.085 * max(0, max(map(len, shown)) - 18)))
    axes = figure.add_subplot()
    cells: Any = {"columns": shown, "write": short if fits else None, "written": scores.to_numpy(float)}
    cells |= {"vmin": -0.12, "vmax": 1}  # the lowest head still has a colour, unlike a missing one
    image = heat_map(axes, depths.to_numpy(float), **cells)
    axes.tick_params(axis="x", rotation=90)
    blocks = [block_label(site, layer) for site, layer, _ in scores.index]
    first = [i for i, block in enumerate(blocks) if i == 0 or blocks[i - 1] != block]
    named = thinned([blocks[i] for i in first], int(height / 0.16))
    axes.set_yticks(np.add(first, [*first[1:], len(blocks)]) / 2 - 0.5, named)
    axes.tick_params(axis="y", length=0)
    for i in first[1:]:
        axes.axhline(i - 0.5, color="black", linewidth=0.6)
    axes.set(xlabel="scorer", ylabel="a row per head")
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02, aspect=30)
    bar.set_label("rank of the head")
    bar.set_ticks([-0.07, 0.95], labels=["matters\nleast", "matters\nmost"])
    bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)
    caption = (
        "Importance of every head, in the order of the model, by every scorer. The colour is the rank of a head: the"
        " darker, the more it matters to that scorer."
    )
    caption += " The numbers are the scores; 4e−5 stands for 0.00004." if fits else ""
    caption += " Grey: no score." if scores.isna().any(axis=None) else ""
    return Plot("heads", caption, figure)
