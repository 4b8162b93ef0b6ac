"""Figures of `experiment=ablate`: accuracy, time, the answer to one example, and runs side by side."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mhaprune.experiments.ablate.words import recoveries
from mhaprune.reporting.heat_map import LOST, heat_map, write_inside
from mhaprune.reporting.labels import SIGNS
from mhaprune.reporting.plots import (
    CONTROL_COLOUR,
    Plot,
    draw_band,
    errors,
    legend_above,
    line_style,
    needs,
    panels,
    scale_in_ratios,
    wrapped,
)
from mhaprune.reporting.whiskers import ARROWS, Whisker, arrows_beyond
from mhaprune.tables import (
    DENSE_AGAIN,
    NOTHING,
    QUALITY,
    SURE,
    Tables,
    candidates,
    quality_name,
    repeated_draws,
    timed_name,
)


@needs("pruning")
def accuracy_curves(tables: Tables) -> Plot:
    """The quality against heads removed, for every scorer, with the band of the random control."""
    pruning = tables["pruning"]
    figure = Figure(figsize=(7, 4.6))
    axes = figure.add_subplot()
    _draw_curves(axes, pruning)
    _draw_recovered(axes, tables)
    sure = _mark_sure(axes, tables)
    total = int(pruning["heads_total"].max())
    axes.set(xlabel=f"heads removed, of {total}", ylabel=quality_name(tables))
    if pruning[QUALITY].between(0, 1).all():  # a share
        axes.set_ylim(-0.03, 1.03)
    axes.set_xticks(sorted(pruning["heads_removed"].unique()))
    legend_above(figure, axes)
    quality = quality_name(tables)
    caption = (
        f"{quality.capitalize()} on the report split after the heads that each chose were removed."
        " Bars are 95 % intervals over examples"
    )
    band = ", the grey line and band the mean and range of the random control." if len(repeated_draws(pruning)) else "."
    marked = " Rings: the most heads that surely can go, at 95 % confidence on the choose split." if sure else ""
    recovered = (
        " Dashed with open marks: the same heads gone, and what is left recovered." if "recovered" in tables else ""
    )
    return Plot("accuracy", caption + band + recovered + marked, figure)


def _draw_curves(axes: Axes, pruning: pd.DataFrame) -> None:
    """Draw a line with intervals per scorer, and a band from least to most with its mean per scorer of several
    draws."""
    for i, name in enumerate(candidates(pruning)):
        curve = pruning[pruning["scorer"] == name].sort_values("heads_removed")
        bars = errors(curve, QUALITY)
        style: Any = {"label": name, "capsize": 2, "markersize": 5, "elinewidth": 1, **line_style(i)}
        axes.errorbar(curve["heads_removed"], curve[QUALITY], bars, **style)
    for name in repeated_draws(pruning):
        draw_band(axes, pruning[pruning["scorer"] == name])


def _draw_recovered(axes: Axes, tables: Tables) -> None:
    """Beside the curve of a scorer the one after each recovery, in the same colour."""
    if "recovered" not in tables:
        return
    names = candidates(tables["pruning"])
    for i, ((name, scorer), curve) in enumerate(tables["recovered"].groupby(["recovery", "scorer"], sort=False)):
        curve = curve.sort_values("heads_removed")
        style = line_style(names.index(scorer)) if scorer in names else {"color": CONTROL_COLOUR, "marker": "x"}
        style |= {"label": f"{scorer}, then {name}", "capsize": 2, "markersize": 7, "elinewidth": 1}
        style |= {"linestyle": ("--", ":", "-.")[i % 3], "markerfacecolor": "none"}
        axes.errorbar(curve["heads_removed"], curve[QUALITY], errors(curve, QUALITY), **style)


def _mark_sure(axes: Axes, tables: Tables) -> bool:
    """Draw a ring on every curve where the heads end that can go surely; returns whether there is any."""
    summary = tables.get("summary", pd.DataFrame())
    if SURE not in summary:
        return False
    names = candidates(tables["pruning"])
    sure = summary[(summary[SURE] > 0) & summary["scorer"].isin(names)]
    inside = sure.groupby(SURE).cumcount()  # rings around one place stay apart by their size
    for (_, row), recovery, i in zip(sure.iterrows(), recoveries(sure), inside, strict=True):
        curves = tables["pruning"] if recovery == NOTHING else tables["recovered"].query("recovery == @recovery")
        point = curves[(curves["scorer"] == row["scorer"]) & (curves["heads_removed"] == row[SURE])]
        style: Any = {"color": line_style(names.index(row["scorer"]))["color"], "marker": "o", "markersize": 11 + 3 * i}
        axes.plot(point["heads_removed"], point[QUALITY], markerfacecolor="none", clip_on=False, **style)
    if len(sure):
        axes.plot([], [], "o", markerfacecolor="none", color="black", markersize=9, label="can go surely")
    return len(sure) > 0


@needs("pruning", "latency")
def latency_curves(tables: Tables) -> Plot | None:
    """The measured speed-up over the dense model against heads removed: filled where next to nothing is lost."""
    if "speedup" not in tables["pruning"]:
        return None
    names = candidates(tables["pruning"])
    pruning = tables["pruning"].dropna(subset=["speedup"])
    pruning = pruning[pruning["scorer"].isin(names)]  # one draw of a control would be noise
    if pruning.empty:
        return None
    figure = Figure(figsize=(7, 4.6))
    axes = figure.add_subplot()
    control = tables["latency"].set_index("scorer").loc[DENSE_AGAIN]
    axes.axhline(1, color="black", linewidth=0.8)
    floor = control["speedup_q1"], control["speedup_q3"]
    axes.axhspan(*floor, color=CONTROL_COLOUR, alpha=0.25, linewidth=0, label="dense against itself")
    limit = float(tables["summary"]["tolerance"].iloc[0]) if "summary" in tables else 0.01
    whiskers: list[Whisker] = []
    for i, name in enumerate(names):
        curve = pruning[pruning["scorer"] == name].sort_values("heads_removed")
        speedup = curve["speedup"]
        bars = np.abs(np.stack([speedup - curve["speedup_q1"], curve["speedup_q3"] - speedup]))
        place = curve["heads_removed"] + 0.012 * curve["heads_total"].max() * (i - (len(names) - 1) / 2)
        look = line_style(i)
        style: Any = {"capsize": 2, "elinewidth": 1, "markersize": 5.5, "markerfacecolor": "white", "label": name}
        axes.errorbar(place, speedup, bars, **style, **look)
        ends = zip(place, curve["speedup_q1"], curve["speedup_q3"], strict=True)
        whiskers += [Whisker(*end, look["color"]) for end in ends]
        dense = curve.loc[curve["heads_removed"].idxmin(), QUALITY]
        kept = curve[QUALITY] >= dense - limit - 1e-9
        axes.plot(place[kept], speedup[kept], linestyle="", markersize=5.5, zorder=3, **look)
    whole = int(pruning["heads_total"].max())
    axes.set(xlabel=f"heads removed, of {whole}", ylabel=f"speed-up of {timed_name(tables)}")
    axes.set_xticks(sorted(pruning["heads_removed"].unique()))
    # A bar may leave the figure; no mark may, nor the strip of noise.
    seen = pd.concat([pruning["speedup"], pd.Series([1.0, *floor])])
    low = min(seen.min(), max(0.85 * seen.min(), pruning["speedup_q1"].min()))
    high = max(seen.max(), min(1.15 * seen.max(), pruning["speedup_q3"].max()))
    scale_in_ratios(axes.yaxis, 0.97 * low, 1.03 * high, 0.05)
    leaves = arrows_beyond(axes, whiskers, vertical=True)
    style = {"color": "black", "marker": "o", "linestyle": "", "markersize": 5.5}
    axes.plot([], [], **style, label=f"filled: loses ≤ {limit:g}")
    legend_above(figure, axes)
    caption = (
        f"How many times as fast {timed_name(tables)} is with heads really removed. Filled marks lose at most"
        f" {limit:g} of {quality_name(tables)} on the report split, open ones more. Bars are quartiles over rounds in"
        " turn, the grey strip is the dense model timed against itself: within it there is no difference to be seen"
    )
    return Plot("latency", f"{caption}{ARROWS if leaves else ''}.", figure)


COLOURS: Any = {"cmap": LOST, "vmin": 0, "vmax": 1.5}
"""A wrong symbol is red, but its name can be read on it."""
MORE = 3
"""Symbols beyond the right answer that are shown. A model with too few heads may never end."""
LETTER = 0.11
"""Inches."""


@needs("answers")
def answers(tables: Tables) -> Plot:
    """Panels for the model as it is left and after each recovery: a row per budget, a cell per symbol of the answer."""
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
