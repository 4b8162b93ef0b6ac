"""What heads look at while the model answers an example."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from math import ceil, isnan
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from mhaprune.reporting.colours import MATTERS, MISSING
from mhaprune.reporting.heat_map import frame, heat_map
from mhaprune.reporting.labels import SIGNS
from mhaprune.reporting.plots import (
    Plot,
    number,
)
from mhaprune.reporting.verdict import REMOVED
from mhaprune.tables import (
    HEAD,
    SITES,
    Tables,
    in_unit,
)

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


def attention_maps(tables: Tables) -> Iterator[Plot]:
    """A figure per example and site: a panel for every head, queries down, keys across."""
    if "attention" not in tables:
        return
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
            axes.set_title(_title(head), fontsize=9.5, fontweight="normal" if _idle(head) else "bold", loc="left")
            weights = attention[(attention["layer"] == head["layer"]) & (attention["head"] == head["head"])]
            if weights.empty:
                _leave_out(axes, REMOVED if head["removed"] else "not asked for")
                continue
            table = weights.pivot_table(index="query", columns="key", values="weight", sort=True)
            image = heat_map(axes, table.to_numpy(float), **scale)
            name_tokens(axes, weights, site, left=j == 0, below=i == len(lines) - 1, sizes=(height, width))
            if j == 0:
                axes.set_ylabel(f"layer {head['layer']}\n{_queries(site)}", fontsize=9.5)
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


def _idle(head: pd.Series) -> bool:
    return bool(head["removed"]) or bool(head["prunable"])


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


def _queries(site: str) -> str:
    return "writing" if site in WRITING else "at token"


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
