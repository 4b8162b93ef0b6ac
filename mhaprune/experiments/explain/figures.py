"""Figures of `experiment=explain`: attention on an example, before and after training, and profiles of heads."""

import textwrap
from collections.abc import Iterator
from math import ceil, isnan
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from mhaprune.experiments.explain.words import ABOVE_CHANCE
from mhaprune.heads import SITES
from mhaprune.reporting.head_map import REMOVED
from mhaprune.reporting.heat_map import MATTERS, MISSING, frame, heat_map
from mhaprune.reporting.labels import SIGNS
from mhaprune.reporting.plots import CONTROL_COLOUR, Plot, needs, number, wrapped
from mhaprune.tables import HEAD, QUALITY, REFERENCE, Tables, in_brackets, in_unit, named, quality_name

ACROSS = 4
"""Panels in a row."""
PANEL = 2.2
"""The largest width of a panel in inches: four panels and the words beside them fit a page."""
CELL, LABEL = 0.21, 0.135
"""Inches: the largest size of a token, and the size that its name needs."""
LEAST_TOP = 0.3
"""The least end of a colour scale: small differences between even weights should not look like large ones."""
NO_PATTERN = "no clear pattern"
WRITING = ("decoder_self", "cross")
"""The sites of our own model at which a token is written."""


@needs("attention")
def attention_maps(tables: Tables) -> Iterator[Plot]:
    """A figure per example and site: a panel for every head, queries down, keys across."""
    attention, examples = tables["attention"], tables["examples"].set_index("example")
    for (number_, site), maps in attention.groupby(["example", "site"], sort=False):
        yield _maps_of(maps, tables["looks"], examples.loc[number_], int(number_), str(site), in_unit(tables))


def _maps_of(
    attention: pd.DataFrame, looks: pd.DataFrame, example: pd.Series, number_: int, site: str, unit: str
) -> Plot:
    shown = attention[["layer"]].drop_duplicates()
    looks = looks[(looks["site"] == site) & looks["layer"].isin(shown["layer"])]
    layers = [rows for _, rows in looks.groupby("layer", sort=True)]
    columns = min(ACROSS, max(map(len, layers)))
    lines = [rows.iloc[start : start + columns] for rows in layers for start in range(0, len(rows), columns)]
    tokens = attention.drop_duplicates("query"), attention.drop_duplicates("key")
    height, width = (len(some) * min(CELL, PANEL / max(len(tokens[1]), 1)) for some in tokens)
    height, width = max(height, 0.6), max(width, 1.85)
    figure = Figure(figsize=(1.6 + columns * (width + 0.15), 0.9 + len(lines) * (height + 0.62)))
    grid: Any = figure.subplots(len(lines), columns, squeeze=False)
    scale, image = scale_of(attention), None
    for i, rows in enumerate(lines):
        for j, axes in enumerate(grid[i]):
            if j >= len(rows):
                axes.remove()
                continue
            head = rows.iloc[j]
            axes.set_title(
                _title(head),
                fontsize=9.5,
                fontweight="normal" if head["removed"] or head["prunable"] else "bold",
                loc="left",
            )
            weights = attention[(attention["layer"] == head["layer"]) & (attention["head"] == head["head"])]
            if weights.empty:
                _leave_out(axes, REMOVED if head["removed"] else "not asked for")
                continue
            table = weights.pivot_table(index="query", columns="key", values="weight", sort=True)
            image = heat_map(axes, table.to_numpy(float), **scale)
            name_tokens(axes, weights, site, left=j == 0, below=i == len(lines) - 1, sizes=(height, width))
            if j == 0:
                axes.set_ylabel(f"layer {head['layer']}\n{'writing' if site in WRITING else 'at token'}", fontsize=9.5)
    figure.supxlabel("it looks at", fontsize=9.5)
    if image is not None:
        shrink = min(1.0, 1.6 / len(lines) / height + 0.3)
        weight_bar(image, figure, attention["weight"].max(), shrink)
    answered = "answer" in example
    named_site = f"{SITES[site]} attention" if site in SITES else site
    said = f"{example['source']} → {example['answer']}" if answered else str(example["source"])
    title = textwrap.fill(f"{named_site}: {said}", int(11 * figure.get_figwidth()))
    figure.suptitle(title, fontsize=11)
    wrong = answered and isinstance(example["right_answer"], str) and example["answer"] != example["right_answer"]
    caption = (
        f"Where every head of {named_site} looks while the model {'answers' if answered else 'reads'} {said}"
        f"{' (wrong: it is ' + str(example['right_answer']) + ')' if wrong else ''}. The darker a cell, the larger"
        f" the attention weight, on one scale for all of the figure{_beyond(attention)}; a row is"
        f" {'the token that is written there' if site in WRITING else 'a token that is read'},"
        f" and its weights add up to 1. Above each its score and the pattern that it follows on the score"
        f" split, if one is clear. {bold(looks, unit)}"
    )
    return Plot(f"attention-{number_}-{site}", caption, figure)


def scale_of(attention: pd.DataFrame) -> dict[str, Any]:
    """Colours of attention weights from 0 to the largest one where there is a choice. A query that can look at a single
    key has a weight of 1 there, which says nothing; beside it all others would be pale."""
    weights = attention[attention["weight"] > 0]
    keys = weights.groupby(["example", *HEAD, "query"])["key"].transform("nunique")
    largest = weights.loc[keys > 1, "weight"].max()
    top = 1.0 if isnan(largest) else min(max(ceil(20 * largest - 1e-6) / 20, LEAST_TOP), 1.0)
    return {"cmap": MATTERS, "vmin": 0, "vmax": top}


def weight_bar(image: AxesImage, figure: Figure, largest: float, shrink: float = 1.0) -> None:
    """The colour bar of attention weights; it ends in a point where there are weights beyond its end."""
    beyond = largest > image.get_clim()[1]
    bar = figure.colorbar(
        image, ax=list(figure.axes), fraction=0.03, shrink=shrink, extend="max" if beyond else "neither"
    )
    bar.set_label("attention weight")
    bar.outline.set_visible(False)


def _beyond(attention: pd.DataFrame) -> str:
    top = scale_of(attention)["vmax"]
    return f" (darkest: {top:g} or more)" if attention["weight"].max() > top else ""


def bold(looks: pd.DataFrame, unit: str) -> str:
    return f"Bold: heads that matter, whose closing alone costs {looks['tolerance'].iloc[0]:g}{unit} or may do so."


def _title(head: pd.Series) -> str:
    if head["removed"]:
        return f"head {head['head']}\n "
    return f"head {head['head']}, {head['scorer']} {number(head['score'], 3)}\n{name_of(head)}"


def name_of(head: pd.Series) -> str:
    return head["name"] if isinstance(head["name"], str) and head["name"] else NO_PATTERN


def _leave_out(axes: Axes, why: str) -> None:
    axes.set_facecolor(MISSING if why == REMOVED else "white")
    frame(axes)
    axes.text(0.5, 0.5, why, ha="center", va="center", fontsize=9.5, transform=axes.transAxes)


def name_tokens(
    axes: Axes, weights: pd.DataFrame, site: str, *, left: bool, below: bool, sizes: tuple[float, float]
) -> None:
    """Name every token, or every second, third, ... token if there is no room for all."""
    queries = weights.drop_duplicates("query")["writes" if site in WRITING else "reads"]
    keys = weights.drop_duplicates("key")["looks_at"]
    for axis, names, size, wanted in (("y", queries, sizes[0], left), ("x", keys, sizes[1], below)):
        words = [SIGNS.get(name, name) for name in names.astype(str)]
        step = ceil(LABEL * len(words) / size)
        axes.tick_params(axis=axis, length=0)  # type: ignore[arg-type]
        last = len(words) - 1
        ticks = [*range(0, last - step + 1, step), last]  # the end always has its name
        labels = [words[i] for i in ticks] if wanted else []
        if axis == "y":
            axes.set_yticks(ticks, labels or [""] * len(ticks), fontsize=9)
        else:
            turned = max(map(len, words)) > 1
            axes.set_xticks(ticks, labels or [""] * len(ticks), fontsize=9, rotation=90 if turned else 0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set(visible=True, color="#999999", linewidth=0.6)


MOST_HEADS = 4
"""Heads that are shown, those that matter most."""


@needs("attention_before")
def before_and_after(tables: Tables) -> Plot:
    """Two rows of attention maps: the heads that matter most in the untrained model, and the same when trained."""
    before = tables["attention_before"]
    example = int(before["example"].iloc[0])
    before, after = (table[table["example"] == example] for table in (before, tables["attention"]))
    shown = named(before.drop_duplicates(HEAD))
    scores, scorer = tables["looks"].set_index(HEAD)["score"], tables["looks"]["scorer"].iloc[0]
    heads = sorted(shown, key=lambda head: -scores[head])
    maps = [[table[(table[HEAD] == list(head)).all(axis=1)] for head in heads] for table in (before, after)]
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


@needs("patterns")
def head_profiles(tables: Tables) -> Plot:
    """Draw the share of attention beyond that of an even head, by patterns; the most important head first."""
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
