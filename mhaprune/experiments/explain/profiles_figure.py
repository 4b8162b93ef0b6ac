"""The profile of every head over many examples: on which places its attention falls, beside what the head is worth."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mhaprune.experiments.explain.figures import NO_PATTERN, bold, name_of
from mhaprune.experiments.explain.patterns import ABOVE_CHANCE
from mhaprune.reporting.heat_map import heat_map
from mhaprune.reporting.plots import CONTROL_COLOUR, Plot, number, wrapped
from mhaprune.tables import HEAD, QUALITY, REFERENCE, Tables, in_brackets, in_unit, named, quality_name

MOST_ROWS = 72
"""Heads of one figure, those that matter most."""
CLEAR = 0.05
"""The least share beyond an even head's that is written."""
TITLE = (
    "Where does a head look? Each row is one head, the most important first. +19 means: 19 percentage points more of"
    " its attention fall there than of a head that looks everywhere alike. Blue is more."
)
AT = "i is the place of the query, i−1 is the key before it; "
OF_OUR_OWN = (
    f"{AT}n is the place of the last symbol, so n−i mirrors i; “end” is the mark after it; “=read” are keys with the"
    " symbol that stands at the query, “=write” keys with the symbol that the decoder writes there"
)
OF_OTHERS = f"{AT}“first” and “last” are the ends of the text, where many tokenizers put a mark"
EMPTY = f"No number: no more than {100 * CLEAR:g} points apart from such a head. Grey: no such place for this head."
COLUMNS = ("i−2", "i−1", "i", "i+1", "i+2", "n−i−1", "n−i", "n−i+1", "first", "last", "end", "=read", "=write")
"""The patterns of all sites, in the order of the figure."""
PLACES = (0.4, 1.2, 2.0, 2.9)
"""Inches from the map: where the columns of words stand."""
SCORER_WIDTH = 0.8
"""Inches of the name of a scorer."""


def head_profiles(tables: Tables) -> Plot | None:
    """Where every head looks more than an even one, by the patterns of its site, the most important head first."""
    if "patterns" not in tables:
        return None
    there = tables["looks"].query("not removed").sort_values("rank")
    looks = there[:MOST_ROWS]
    patterns = tables["patterns"].set_index(HEAD)
    columns = [name for name in COLUMNS if name in set(patterns["pattern"])]
    beyond = np.full((len(looks), len(columns)), np.nan)
    for i, head in enumerate(looks[HEAD].itertuples(index=False, name=None)):
        for pattern in patterns.loc[[head]].itertuples():
            beyond[i, columns.index(pattern.pattern)] = pattern.mass - pattern.chance
    width = 6.4 + 0.46 * len(columns)
    letters = int(12.5 * width)
    signs = textwrap.fill(f"Columns: {OF_OUR_OWN if 'end' in columns else OF_OTHERS}. {EMPTY}", letters)
    title = textwrap.fill(TITLE, int(0.95 * letters))
    lines = signs.count("\n") + title.count("\n")
    figure = Figure(figsize=(width, 1.5 + 0.17 * lines + 0.235 * len(looks)))
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.supxlabel(signs, x=0.01, ha="left", fontsize=9)
    axes, words = figure.subplots(1, 2, sharey=True, width_ratios=[0.46 * len(columns), 4.9])
    names: Any = {"rows": [head.label for head in named(looks)], "columns": columns}
    names |= {"vmin": 0, "vmax": max(0.3, float(np.nanmax(beyond, initial=0.0)))}
    clear = np.where(np.abs(beyond) >= CLEAR, beyond, np.nan)
    heat_map(axes, np.maximum(beyond, 0), **names, write=_points, written=clear)
    axes.tick_params(labelsize=9)
    for side in (axes, words):
        side.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        side.grid(visible=False)
        side.spines[:].set_visible(False)
    words.tick_params(labelleft=False, labelsize=9)
    _write_facts(words, looks, tables)
    shown = "every head does" if len(looks) == len(there) else f"the first {len(looks)} of {len(there)} heads do"
    caption = (
        f"What {shown}, the most important first. A number is the share of its attention on the score split that"
        " falls on a pattern beyond that of a head that looks everywhere alike, in percentage points; the darker, the"
        f" more. There is none within {100 * CLEAR:g} points of such a head; a cell is grey where the site has no such"
        " pattern. Patterns overlap. Then its score, the"
        f" {quality_name(tables)} on the report split without it, the mean entropy of its weights (nats), and what it"
        " is named after: of the patterns on which most of its largest weights fall, and"
        f" {100 * ABOVE_CHANCE:g} % of the attention that is possible beyond chance, the one that exceeds chance most;"
        f" or “everywhere”. {bold(looks, in_unit(tables))}"
    )
    return Plot("patterns", caption, figure)


def _points(share: float) -> str:
    """A share that is more or less than another one, in percentage points with its sign."""
    return f"{'+' if share > 0 else ''}{number(100 * share, 0)}"


def _write_facts(words: Axes, looks: pd.DataFrame, tables: Tables) -> None:
    """The columns of words beside the map: bold for heads that matter, grey for what has no name."""
    scorer = looks["scorer"].iloc[0]
    unit = in_brackets(tables).replace(" ", "\n") if scorer == REFERENCE else ""
    facts = {
        f"{wrapped(scorer, SCORER_WIDTH)}{unit}": [number(score, 3) for score in looks["score"]],
        f"{wrapped(quality_name(tables), 1)}\nwithout it": [number(share, 2) for share in looks[QUALITY]],
        "entropy\n(nats)": [number(value, 2) for value in looks["entropy"]],
        "looks at": [_name_and_place(head) for _, head in looks.iterrows()],
    }
    words.set(xlim=(0, 4.9), xticks=PLACES, xticklabels=list(facts))
    for (name, cells), place in zip(facts.items(), PLACES, strict=True):
        for row, (cell, idle) in enumerate(zip(cells, looks["prunable"], strict=True)):
            style: Any = {"fontweight": "normal" if idle else "bold"}
            if cell == NO_PATTERN:
                style = {"color": CONTROL_COLOUR}
            side = "left" if name == "looks at" else "center"
            words.text(place - 0.3 * (side == "left"), row, cell, ha=side, va="center", fontsize=9, **style)


def _name_and_place(head: pd.Series) -> str:
    """The name with the column that it is taken from."""
    place = f" ({head['pattern']})" if isinstance(head["pattern"], str) and head["pattern"] else ""
    return name_of(head) + place
