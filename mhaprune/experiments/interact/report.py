"""The report of `experiment=interact`: which heads stand in for each other, in pairs and when many are removed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mhaprune.heads import HeadId
from mhaprune.reporting import plots
from mhaprune.reporting.headline import Number
from mhaprune.reporting.heat_map import EXTRA_COST, MISSING, heat_map
from mhaprune.reporting.plots import Plot, amount, needs, number, wrapped
from mhaprune.tables import HEAD, INTERACTION, LOSS_RISE, OTHER_HEAD, Tables, in_brackets, in_unit, named, quality_name

STAND_IN, TOGETHER, BROKEN, NEITHER = "stand in for each other", "work together", "one breaks the model", "neither"
"""The values of the column `kind`; `NEITHER` if the interaction is small or not sure."""
LARGEST = 10.0
"""Largest size of the matrix in inches. With more heads than fit, cells shrink and lose their numbers."""
CELL = 0.44
"""The size of a cell with a number, in inches."""
SMALL = 0.01
"""The axis of the rise of the loss is in proportion up to this number, and logarithmic beyond."""


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences: the pair that stands in for each other most, the pair that works together most, the number of
    pairs of each kind, and the cost of removing many heads together."""
    pairs, unit = tables["pairs"], in_unit(tables)
    alone = dict(zip(named(tables["alone"]), tables["alone"][LOSS_RISE], strict=True))
    for what, sign in ((STAND_IN, 1), (TOGETHER, -1)):
        helped = [min(alone[a], alone[b]) < 0 for a, b in zip(named(pairs), other_heads(pairs), strict=True)]
        rows = pairs[(pairs["kind"] == what) & ~np.array(helped, dtype=bool)]  # closing a harmful head is no loss
        rows = rows.loc[(sign * rows[INTERACTION]).nlargest(1).index]
        for first, second, both in zip(named(rows), other_heads(rows), rows[LOSS_RISE], strict=True):
            yield (
                f"{first} and {second} {what} most: alone they cost {alone[first]:.3f} and"
                f" {alone[second]:.3f}{unit} on the report split, together {both:.3f}."
            )
    count = pairs["kind"].value_counts()
    more, less, full = (int(count.get(kind, 0)) for kind in (STAND_IN, TOGETHER, BROKEN))
    yield (
        f"Pairs of heads that {STAND_IN}: {more or 'none'} of {len(pairs)}. Together they cost at least"
        f" {pairs['tolerance'].iloc[0]:g}{unit} more than the sum of both alone, at 95 % confidence for all pairs"
        f" together. Pairs that {TOGETHER}, and so cost as much less: {less or 'none'}."
    )
    if full:
        half = "half of the answers" if quality_name(tables) == "exact match" else f"half of {quality_name(tables)}"
        yield f"{full} pair{'s' * (full > 1)} cannot be judged: one of the two heads alone already spoils {half}."
    for scorer, rows in tables["together"].groupby("scorer", sort=False):
        half = half_of(rows)
        yield (
            f"The {half['heads_removed']} heads that go first by {scorer} cost {half['expected_alone']:.3f}{unit} by"
            f" the sum of what each costs alone, and {half[LOSS_RISE]:.3f} when all of them are gone; with the"
            f" interactions of their pairs one expects {half['expected_pairs']:.3f}."
        )


def signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value, 2)


def half_of(rows: pd.DataFrame) -> pd.Series:
    """Return the row with at most half of the heads removed."""
    return rows[rows["heads_removed"] <= rows["heads_total"] / 2].iloc[-1]


def headline(tables: Tables) -> list[Number]:
    """Return the numbers of pairs that stand in for each other and that work together."""
    kinds = tables["pairs"]["kind"]
    return [
        Number(f"pairs of heads that {kind}", float((kinds == kind).sum()), len(kinds), "", 0.0, len(kinds))
        for kind in (STAND_IN, TOGETHER)
    ]


def other_heads(pairs: pd.DataFrame) -> list[HeadId]:
    """Return the second head of each pair."""
    return named(pairs[OTHER_HEAD].set_axis(HEAD, axis=1))


@needs("pairs", "alone")
def interactions(tables: Tables) -> Plot | None:
    """Draw the interaction of each pair of heads whose interaction is large and sure, as a triangle with a row and a
    column for each head that has one."""
    pairs, tolerance = tables["pairs"], f"{tables['pairs']['tolerance'].iloc[0]:g}{in_unit(tables)}"
    sure = pairs[pairs["kind"].isin((STAND_IN, TOGETHER))]
    involved = {*named(sure), *other_heads(sure)}
    heads = [head for head in named(tables["alone"]) if head in involved]
    if not heads:
        return None
    place, values = {head: i for i, head in enumerate(heads)}, np.full((len(heads), len(heads)), np.nan)
    full = np.zeros(values.shape, dtype=bool)
    for a, b, cost, kind in zip(named(pairs), other_heads(pairs), pairs[INTERACTION], pairs["kind"], strict=True):
        if {a, b} <= involved:
            column, row = sorted((place[a], place[b]))
            values[row, column], full[row, column] = cost if kind in (STAND_IN, TOGETHER) else np.nan, kind == BROKEN
    some = ~np.isnan(values) | full
    rows, columns = some.any(axis=1), some.any(axis=0)  # a triangle without its empty rows and columns
    values, full = values[rows][:, columns], full[rows][:, columns]
    cell = min(CELL, LARGEST / len(heads))
    figure = Figure(figsize=(3.8 + cell * values.shape[1], max(2.6 + cell * values.shape[0], 4.0)))
    axes = figure.add_subplot()
    top = float(np.nanmax(np.abs(values)))
    norm = FuncNorm((lambda x: np.sign(x) * np.abs(x) ** 0.5, lambda x: np.sign(x) * x**2), -top, top)
    names: Any = {
        which: [head.label for head, is_shown in zip(heads, shown, strict=True) if is_shown]
        for which, shown in (("rows", rows), ("columns", columns))
    }
    write = signed if cell == CELL else None
    image = heat_map(axes, values, **names, cmap=EXTRA_COST, norm=norm, aspect="equal", write=write)
    axes.set_facecolor("white")
    for row, column in np.argwhere(full):
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=MISSING, edgecolor="white"))
    axes.tick_params(length=0, labelsize=9)
    axes.tick_params(axis="x", rotation=90)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(
        image, ax=axes, shrink=0.8, ticks=[-top, -top / 4, 0, top / 4, top], format=lambda value, _: signed(value)
    )
    bar.set_label(f"cost together beyond the sum{in_brackets(tables)}")
    counts = (f"that {kind}: {int((pairs['kind'] == kind).sum())}" for kind in (STAND_IN, TOGETHER))
    figure.suptitle(wrapped(f"Pairs of heads {', '.join(counts)}", figure.get_figwidth() - 1))
    caption = (
        "What two heads cost together beyond the sum of what each costs alone, in loss on the report split. Only pairs"
        f" beyond {tolerance} are shown, at 95 % confidence for all pairs together, and heads that have such a pair."
        " Red: they stand in for each other, and closing both costs more. Blue: they work together, and each is worth"
        " less without the other. Grey is saturation: one of them alone already leaves at most half of"
        f" {quality_name(tables)}, so the loss cannot rise much more."
    )
    return Plot("interactions", caption, figure)


@needs("together")
def together(tables: Tables) -> Plot:
    """Draw the measured rise of the loss when heads are removed together, and the expected rise: a panel per scorer."""
    table = tables["together"]
    scorers = list(table["scorer"].unique())
    labels = f"heads removed, of {int(table['heads_total'].max())}", f"rise of the loss{in_brackets(tables)}"
    figure, grid = plots.panelled(len(scorers), 2, (4.6, 3.3), (1.6, 0.6), *labels, sharey=True)
    for axes, scorer in zip(grid, scorers, strict=True):
        rows = table[table["scorer"] == scorer].sort_values("heads_removed")
        removed = rows["heads_removed"]
        what = {"expected_alone": "sum of each alone", "expected_pairs": "sum with pairs"}
        for i, (column, name) in enumerate(what.items()):
            axes.plot(removed, rows[column], linestyle="--", markersize=3.5, label=name, **plots.line_style(i))
        measured: Any = {"color": "black", "marker": "o", "markersize": 3.5, "label": "measured"}
        plots.draw_curve(axes, rows, "heads_removed", LOSS_RISE, **measured)
        axes.set_yscale("symlog", linthresh=SMALL)
        plots.plain_ticks(axes.yaxis)
        half = half_of(rows)
        cost = f"{amount(half[LOSS_RISE])}{in_unit(tables)} together, {amount(half['expected_alone'])} one by one"
        axes.set_title(wrapped(f"{half['heads_removed']} heads, in the order of {scorer}, cost {cost}", 4.4))
    plots.legend_above(figure, grid[0])
    caption = (
        "The rise of the loss on the report split as heads go together, and what one expects of it: the sum of what"
        " each head costs alone, and that sum with the interactions of all pairs added. Bars are 95 % intervals over"
        f" examples; the axis is in proportion up to {SMALL:g}{in_unit(tables)} and logarithmic beyond."
    )
    return Plot("together", caption, figure)
