"""One example, answered with fewer and fewer heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from mhaprune.reporting.colours import LOST
from mhaprune.reporting.heat_map import heat_map, write_inside
from mhaprune.reporting.labels import SIGNS
from mhaprune.reporting.plots import Plot, panels, wrapped
from mhaprune.tables import NOTHING, Tables

COLOURS: Any = {"cmap": LOST, "vmin": 0, "vmax": 1.5}
"""A wrong symbol is red, but its name can be read on it."""
MORE = 3
"""Symbols beyond the right answer that are shown. A model with too few heads may never end."""
LETTER = 0.11
"""Inches."""


def answers(tables: Tables) -> Plot | None:
    """Panels for the model as it is left and after each recovery: a row per budget, a cell per symbol of the answer."""
    if "answers" not in tables or tables["answers"].empty:
        return None
    table = tables["answers"].fillna("")
    first = table.iloc[0]
    right = _symbols(str(first["right_answer"]), first)
    most = max(len(right), 1) + MORE
    said = [_cut(_symbols(str(answer), first), most) for answer in table["answer"]]
    places = max(len(right), *map(len, said), 1)
    removed, ways = sorted(table["heads_removed"].unique()), list(table["recovery"].unique())
    longest = max((len(symbol) for symbols in (right, *said) for symbol in symbols), default=1)
    width = max(places * max(0.3, LETTER * (longest + 1)), 1.9)
    figure = Figure(figsize=(1.3 + (width + 0.2) * len(ways), 1.3 + 0.28 * len(removed)))
    grid = panels(figure, len(ways), len(ways), "place in the answer", f"heads removed, of {first['heads_total']}")
    for axes, way in zip(grid, ways, strict=True):
        rows = table[table["recovery"] == way].set_index("heads_removed")["answer"]
        cells = [_cut(_symbols(str(rows.get(number, "")), first), most) for number in removed]
        wrong = np.full((len(removed), places), np.nan)
        for i, symbols in enumerate(cells):
            for j, symbol in enumerate(symbols):
                wrong[i, j] = float(j >= len(right) or symbol != right[j])
            wrong[i, len(symbols) : len(right)] = 1.0  # what is not said is wrong, too
        heat_map(axes, wrong, rows=removed, columns=range(1, places + 1), **COLOURS)
        axes.set_facecolor("white")
        for i, symbols in enumerate(cells):
            for j, symbol in enumerate(symbols):
                bad = bool(wrong[i, j])
                style: Any = {"fontweight": "bold" if bad else "normal", "color": "white" if bad else "black"}
                write_inside(axes, j, i, symbol, fontsize=9, **style)
        axes.set_title("as it is left" if way == NOTHING else f"after {way}")
    title = f"{first['source']} → {first['right_answer']}"
    figure.suptitle(wrapped(title, 0.9 * figure.get_figwidth()), fontsize=11)
    caption = (
        "What the model answers to the first example of the report split with fewer and fewer heads, removed in the"
        f" order of {first['scorer']}. Red: a symbol that is wrong or missing; “…”: it goes on."
    )
    return Plot("answers", caption, figure)


def _symbols(words: str, example: pd.Series) -> list[str]:
    """The symbols of an answer: words or, where the right answer is a single word, its letters."""
    apart = " " in str(example["right_answer"])
    return [SIGNS.get(symbol, symbol) for symbol in (words.split() if apart else words)]


def _cut(symbols: list[str], most: int) -> list[str]:
    return symbols if len(symbols) <= most else [*symbols[: most - 1], "…"]
