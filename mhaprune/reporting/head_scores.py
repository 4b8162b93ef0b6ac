"""The scores of all heads, each as a share of the largest score by the same scorer, so that scorers can be compared."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from mhaprune.heads import block_label
from mhaprune.reporting.heat_map import heat_map, thinned
from mhaprune.reporting.plots import Plot, amount, elided, needs, wrapped
from mhaprune.tables import HEAD, REFERENCE, Tables, candidates

MOST_NUMBERS = 12
"""Largest number of scorers for which numbers are written into the cells."""
TALLEST = 11.0
"""Largest height in inches. With more heads than fit, rows shrink and lose their numbers."""


@needs("heads")
def head_scores(tables: Tables) -> Plot | None:
    """Draw a row per head and a column per scorer: the score in percent of the scorer's largest, as a colour and, with
    enough room, as a number."""
    heads = tables["heads"]
    names = candidates(heads)
    if not names:
        return None
    heads = heads[heads["scorer"].isin(names)]
    every = pd.MultiIndex.from_frame(heads[HEAD].drop_duplicates())  # also a head that no scorer has a number for
    scores = heads.pivot_table(index=HEAD, columns="scorer", values="score").reindex(index=every, columns=names)
    percent = in_percent(scores.replace([np.inf, -np.inf], np.nan))
    height = max(min(0.2 * len(scores), TALLEST), 1.8)
    fits = len(names) <= MOST_NUMBERS and height / len(scores) > 0.17
    shown = [elided(name, 24) for name in names]
    wide = 0.6 if fits else 0.27
    figure = Figure(figsize=(4.2 + wide * len(names), 1.8 + height + 0.085 * max(0, max(map(len, shown)) - 18)))
    axes = figure.add_subplot()
    write = (lambda value: amount(value, 0)) if fits else None
    colours: Any = {"norm": PowerNorm(0.5, 0, 100, clip=True)}
    image = heat_map(axes, percent.to_numpy(float), columns=shown, write=write, **colours)
    axes.tick_params(axis="x", rotation=90)
    blocks = [block_label(site, layer) for site, layer, _ in scores.index]
    first = [i for i, block in enumerate(blocks) if i == 0 or blocks[i - 1] != block]
    named = thinned([blocks[i] for i in first], int(height / 0.16))
    axes.set_yticks(np.add(first, [*first[1:], len(blocks)]) / 2 - 0.5, named)
    if fits:
        axes.set_yticks(range(len(scores)), scores.index.get_level_values("head"), minor=True)
    axes.tick_params(axis="y", which="both", length=0)
    axes.tick_params(axis="y", which="major", pad=20 if fits else 3.5)  # beside the numbers of the heads
    for i in first[1:]:
        axes.axhline(i - 0.5, color="black", linewidth=0.6)
    axes.set(ylabel="" if fits else "a row per head")
    scorer = REFERENCE if REFERENCE in percent else names[0]
    high = int((percent[scorer] >= 10).sum())
    title = f"{high} of {len(percent)} heads reach a tenth of the largest score by {elided(scorer)}"
    figure.suptitle(wrapped(title, 0.9 * figure.get_figwidth()), fontsize=10)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, aspect=40, ticks=[0, 1, 10, 50, 100])
    bar.set_label("% of the scorer's largest score")
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    caption = (
        "How much each head matters, in the order of the model: its score in percent of the largest score by the same"
        " scorer; if all scores of a scorer are negative, 0 is its lowest."
    )
    caption += " Grey: no score." if percent.isna().any(axis=None) else ""
    return Plot("heads", caption, figure)


def in_percent(scores: pd.DataFrame) -> pd.DataFrame:
    """Return each column in percent of its largest number. A column without a positive number goes from 0 to 100."""
    lowest = scores.min().where(scores.max() <= 0, 0.0)
    largest = (scores.max() - lowest).replace(0, 1.0)
    return 100 * (scores - lowest) / largest
