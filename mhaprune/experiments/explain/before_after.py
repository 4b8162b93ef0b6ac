"""Where the heads that matter most look, before training and after it."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from mhaprune.experiments.explain.figures import PANEL, name_tokens, scale_of, weight_bar
from mhaprune.reporting.heat_map import heat_map
from mhaprune.reporting.plots import Plot, number
from mhaprune.tables import HEAD, HeadName, Tables, named

MOST_HEADS = 4
"""Heads that are shown, those that matter most."""


def before_and_after(tables: Tables) -> Plot | None:
    """Two rows of attention maps: the heads that matter most in the untrained model, and the same when trained."""
    if "attention_before" not in tables or tables["attention_before"].empty:
        return None
    before = tables["attention_before"]
    example = int(before["example"].iloc[0])
    before, after = (table[table["example"] == example] for table in (before, tables["attention"]))
    shown = named(before.drop_duplicates(HEAD))
    scores, scorer = tables["looks"].set_index(HEAD)["score"], tables["looks"]["scorer"].iloc[0]
    heads = sorted(shown, key=lambda head: -scores[head])
    maps = [[_of(table, head) for head in heads] for table in (before, after)]
    shown_weights = pd.concat([cells for row in maps for cells in row])
    scale = scale_of(shown_weights)
    figure = Figure(figsize=(1.9 + (PANEL + 0.3) * len(heads), 5.9))
    grid: Any = figure.subplots(2, len(heads), squeeze=False)
    for i, (row, when) in enumerate(zip(maps, ("before training", "after training"), strict=True)):
        for j, (cells, head) in enumerate(zip(row, heads, strict=True)):
            axes = grid[i, j]
            weights = cells.pivot_table(index="query", columns="key", values="weight", sort=True).to_numpy(float)
            image = heat_map(axes, weights, **scale)
            name_tokens(axes, cells, head.site, left=True, below=True, sizes=(1.7, PANEL))
            if i == 0:
                axes.set_title(f"{head.label}\n{scorer} {number(scores[head], 3)}", fontsize=10)
        grid[i, 0].set_ylabel(when, fontsize=11, fontweight="bold")
    figure.supxlabel("it looks at", fontsize=9.5)
    weight_bar(image, figure, shown_weights["weight"].max())
    row = tables["examples"].set_index("example").loc[example]
    caption = (
        f"Where the {len(heads)} heads that matter most look while the model writes {row['answer']} for"
        f" {row['source']}: above in the untrained model, made again from the seed, below in the trained one. Both read"
        " the answer of the trained one. One colour scale for all; the weights of a row add up to 1."
    )
    return Plot("attention-before-after", caption, figure)


def _of(attention: pd.DataFrame, head: HeadName) -> pd.DataFrame:
    return attention[(attention[HEAD] == list(head)).all(axis=1)]
