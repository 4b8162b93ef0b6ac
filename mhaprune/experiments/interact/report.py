"""The report of `experiment=interact`: which heads stand in for each other, in pairs and when many are removed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

from mhaprune.heads import HeadId, block_label
from mhaprune.reporting import plots
from mhaprune.reporting.headline import Number
from mhaprune.reporting.heat_map import EXTRA_COST, heat_map
from mhaprune.reporting.plots import Plot, needs
from mhaprune.tables import HEAD, INTERACTION, LOSS_RISE, OTHER_HEAD, Tables, in_brackets, in_unit, named, quality_name

STAND_IN, TOGETHER, BROKEN, NEITHER = "stand in for each other", "work together", "one breaks the model", "neither"
"""The values of the column `kind`; `NEITHER` if the interaction is small or not sure."""
LARGEST = 18.0
"""Largest size of the matrix in inches. With more heads than fit, cells shrink and lose the numbers of their heads."""
SMALL = 0.01
"""Colours of the matrix are linear up to this number of nats, and logarithmic beyond."""


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
        f"{more or 'None'} of {len(pairs)} pairs of heads {STAND_IN}: together they cost at least"
        f" {pairs['tolerance'].iloc[0]:g}{unit} more than the sum of both alone, at 95 % confidence for all pairs"
        f" together. {less or 'None'} {TOGETHER}: they cost as much less. {full or 'None'} cost less because one of the"
        f" two alone already leaves at most half of {quality_name(tables)}, which says little."
    )
    for scorer, rows in tables["together"].groupby("scorer", sort=False):
        half = rows[rows["heads_removed"] <= rows["heads_total"] / 2].iloc[-1]
        yield (
            f"The {half['heads_removed']} heads that go first by {scorer} cost {half['expected_alone']:.3f}{unit} by"
            f" the sum of what each costs alone, and {half[LOSS_RISE]:.3f} when all of them are gone; with the"
            f" interactions of their pairs one expects {half['expected_pairs']:.3f}."
        )


def headline(tables: Tables) -> list[Number]:
    """Return the shares of pairs that stand in for each other and that work together."""
    kinds = tables["pairs"]["kind"]
    return [
        Number(f"% of pairs that {kind}", 100 * float((kinds == kind).mean()), least=0.0, most=100.0)
        for kind in (STAND_IN, TOGETHER)
    ]


def other_heads(pairs: pd.DataFrame) -> list[HeadId]:
    """Return the second head of each pair."""
    return named(pairs[OTHER_HEAD].set_axis(HEAD, axis=1))


@needs("pairs")
def interactions(tables: Tables) -> Plot:
    """Draw the interaction of each pair of heads, as a matrix with a row and a column per head."""
    pairs, heads = tables["pairs"], named(tables["alone"])
    place, values = {head: i for i, head in enumerate(heads)}, np.full((len(heads), len(heads)), np.nan)
    first, second = (np.array([place[head] for head in own]) for own in (named(pairs), other_heads(pairs)))
    values[first, second] = values[second, first] = pairs[INTERACTION]
    side = min(max(0.24 * len(heads), 2.2), LARGEST)
    figure = Figure(figsize=(3.4 + side, 1.6 + side))
    axes = figure.add_subplot()
    largest = max(float(np.nanmax(np.abs(values))), 2 * SMALL)
    norm = SymLogNorm(SMALL, vmin=-largest, vmax=largest)
    numbers = [head.head for head in heads] if side > 0.2 * len(heads) else []
    image = heat_map(axes, values, rows=numbers, columns=numbers, cmap=EXTRA_COST, norm=norm, aspect="equal")
    for kind, marker, size in ((NEITHER, ".", 2), (BROKEN, "x", 4)):
        rows, columns = first[pairs["kind"] == kind], second[pairs["kind"] == kind]
        places = [*rows, *columns], [*columns, *rows]
        axes.plot(*places, linestyle="", marker=marker, markersize=size, color="black")
    blocks = [(head.site, head.layer) for head in heads]
    starts = [i for i, block in enumerate(blocks) if i == 0 or blocks[i - 1] != block]
    for start, end in zip(starts, [*starts[1:], len(heads)], strict=True):
        if start:
            axes.axvline(start - 0.5, color="black", linewidth=0.6)
            axes.axhline(start - 0.5, color="black", linewidth=0.6)
        name, middle = block_label(*blocks[start]), (start + end - 1) / 2
        left: Any = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center"}
        below: Any = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "top", "rotation": 90}
        axes.annotate(name, (0, middle), (-26, 0), textcoords="offset points", **left)
        axes.annotate(name, (middle, 0), (0, -24), textcoords="offset points", **below)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    words = f"red: {STAND_IN}\nblue: {TOGETHER}\n×: {BROKEN}\n"
    bar.set_label(f"{words}interaction{in_brackets(tables)}", fontsize=9)
    bar.ax.minorticks_off()
    tolerance = f"{pairs['tolerance'].iloc[0]:g}{in_unit(tables)}"
    caption = (
        "What two heads cost together beyond the sum of what each costs alone, in loss on the report split. Red: they"
        " stand in for each other, and closing both costs more. Blue: they work together, and each is worth less"
        f" without the other. A cross: one of them alone already leaves at most half of {quality_name(tables)}. A dot:"
        f" less than {tolerance}, or no difference from 0 at 95 % confidence for all pairs together. Colours are in"
        f" proportion up to {SMALL:g}{in_unit(tables)} and follow the logarithm beyond."
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
        axes.set_title(f"in the order of {scorer}")
    plots.legend_above(figure, grid[0])
    caption = (
        "The rise of the loss on the report split as heads go together, and what one expects of it: the sum of what"
        " each head costs alone, and that sum with the interactions of all pairs added. Bars are 95 % intervals over"
        f" examples; the axis is in proportion up to {SMALL:g}{in_unit(tables)} and logarithmic beyond."
    )
    return Plot("together", caption, figure)
