"""The figures of hard pruning: how few heads are enough, which, in what order, and what suffers first."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from mhaprune.experiments.prune.words import fewest_heads
from mhaprune.heads import SITES, block_label
from mhaprune.reporting.heat_map import LOST, bar_in_words, heat_map
from mhaprune.reporting.plots import (
    COLOURS,
    CONTROL_COLOUR,
    Plot,
    columns_of,
    errors,
    legend_above,
    line_style,
    needs,
    number,
    panels,
    wrapped,
)
from mhaprune.tables import BLOCK, NOTHING, QUALITY, Tables, block_order, blocks_in, head_names, quality_name

SIZES = "heads kept (fewer to the right)"
CONTROL: Any = {"color": CONTROL_COLOUR, "linewidth": 8, "alpha": 0.45, "solid_capstyle": "round", "zorder": 1.5}
"""Broad, below the curves: the control often coincides with them."""


@needs("recovery")
def recovery_curves(tables: Tables) -> Plot:
    """Exact match against heads kept: a panel per recovery, a line per schedule, the control in grey in each."""
    table = tables["recovery"]
    control, own = table[table["control"]], table[~table["control"]]
    names, ways = list(own["recovery"].unique()), list(ways_of(own).unique())
    columns = columns_of(len(names), 3)
    figure = Figure(figsize=(1 + 3.6 * columns, 1.0 + 3.0 * -(-len(names) // columns)))
    place = _places(table)
    grid = panels(figure, len(names), columns, SIZES, quality_name(tables), sharex=True, sharey=True)
    for axes, name in zip(grid, names, strict=True):
        if len(control):
            band = control.groupby("heads_kept")[QUALITY].agg(["min", "mean", "max"]).sort_index()
            where = [place[kept] for kept in band.index]
            axes.fill_between(where, band["min"], band["max"], color=CONTROL_COLOUR, alpha=0.25, linewidth=0)
            label = f"{control['recovery'].iloc[0]} (mean and range)"
            axes.plot(where, band["mean"], label=label, **CONTROL)
        curves = own[own["recovery"] == name]
        for way, curve in curves.groupby(ways_of(curves), sort=False):
            i = ways.index(str(way))
            # Curves that coincide stay apart by their place and the size of their marks.
            x = np.array([place[kept] for kept in curve["heads_kept"]]) + 0.08 * (i - (len(ways) - 1) / 2)
            bars = errors(curve, QUALITY)
            axes.errorbar(x, curve[QUALITY], bars, label=way, capsize=2, elinewidth=1, **line_style(i))
        axes.set(
            title=wrapped(_title(name), 3.4), ylim=(-0.03, 1.03), xticks=range(len(place)), xticklabels=list(place)
        )
    legend_above(figure, grid[0])
    caption = (
        f"{quality_name(tables).capitalize()} on the report split against heads left, one panel for each"
        " recovery; bars are 95 % intervals over examples. All sizes that were measured stand at equal distances."
    )
    if len(control):
        caption += " Grey: the best shape of each size trained from random weights for as many steps in all."
    return Plot("recovery", caption, figure)


@needs("recovery")
def survivors(tables: Tables) -> Plot | None:
    """Draw the number of heads left in each block, model by model: a panel per schedule."""
    table = tables["recovery"]
    own = table[~table["control"]]
    choices: dict[str, pd.DataFrame] = {}
    for (_, _, recovery), models in own.groupby(["schedule", "scorer", "recovery"], sort=False):
        way = _way_of(models.iloc[0])
        # A recovery at the end does not change the choice; a recovery between the budgets may.
        if way not in choices:
            choices[way] = models
        elif dict(zip(models["heads_kept"], models["kept"], strict=True)) != dict(
            zip(choices[way]["heads_kept"], choices[way]["kept"], strict=True)
        ):
            choices[f"{way},\n{recovery}"] = models
    ways, place = list(choices), _places(own)
    blocks = {(head.site, head.layer) for kept in own["kept"] for head in head_names(kept)}
    if not blocks:
        return None
    sites = list(dict.fromkeys([*SITES, *sorted(site for site, _ in blocks)]))  # ours keep their colours
    columns = columns_of(len(ways), 4)
    figure = Figure(figsize=(1.2 + 2.9 * columns, 1.0 + 2.6 * -(-len(ways) // columns)))
    grid = panels(figure, len(ways), columns, SIZES, "heads in each block", sharex=True, sharey=True)
    for axes, way in zip(grid, ways, strict=True):
        models = choices[way]
        x, bottom = [place[kept] for kept in models["heads_kept"]], np.zeros(len(models))
        for block in sorted(blocks, key=lambda block: block_order(*block)):
            counts = np.array(
                [sum(head[:2] == block for head in head_names(kept)) for kept in models["kept"]], dtype=float
            )
            style: Any = {"color": _shade(*block, sites), "edgecolor": "white", "linewidth": 0.5}
            style |= {"label": block_label(*block)}
            axes.bar(x, counts, 0.85, bottom, **style)
            bottom += counts
        axes.set_title("\n".join(wrapped(line, 2.7) for line in way.splitlines()))
        axes.set(xticks=range(len(place)), xticklabels=list(place))
        axes.grid(visible=False, axis="x")
    legend_above(figure, grid[0])
    caption = (
        "Which heads survive: the number of heads left in each block, by the size of the model; the lighter, the higher"
        " the layer. After Voita et al. 2019, figure 8."
    )
    return Plot("survivors", caption, figure)


@needs("groups", "smallest")
def accuracy_by_group(tables: Tables) -> Plot:
    """Exact match on every kind of example × heads kept, before and after recovery, for the schedule that does best."""
    own = tables["smallest"][~tables["smallest"]["control"]]
    best = fewest_heads(own)
    groups = tables["groups"]
    groups = groups[(groups["schedule"] == best["schedule"]) & (groups["scorer"] == best["scorer"])]
    groups = groups[groups["recovery"].isin(own["recovery"])]
    names, kinds = list(groups["recovery"].unique()), list(dict.fromkeys(groups["group"]))
    counts = groups.drop_duplicates("group").set_index("group").get("examples", pd.Series(dtype=float))
    labels = [f"{kind} (n = {counts[kind]:.0f})" if kind in counts else kind for kind in kinds]
    sizes = sorted(groups["heads_kept"].unique(), reverse=True)
    columns = columns_of(len(names), 3)
    figure = Figure(
        figsize=(
            2.2 + max(0.5 + 0.42 * len(sizes), 2.4) * columns,
            1.0 + (0.7 + 0.3 * len(kinds)) * -(-len(names) // columns),
        )
    )
    figure.suptitle(f"{quality_name(tables)} in %, by kind of example", fontsize=11)
    grid = panels(figure, len(names), columns, SIZES)
    for axes, name in zip(grid, names, strict=True):
        rows = groups[groups["recovery"] == name]
        values = rows.pivot_table(index="group", columns="heads_kept", values=QUALITY)
        values = 100 * values.reindex(index=kinds, columns=sizes).to_numpy(float)
        colours: Any = {"cmap": f"{LOST}_r", "vmin": 0, "vmax": 100}
        heat_map(axes, values, rows=labels, columns=sizes, write=partial(number, decimals=0), **colours)
        axes.set_title(wrapped(_title(name), 0.5 + 0.42 * max(len(sizes), 5)))
    caption = (
        f"{quality_name(tables).capitalize()} in percent on every kind of example of the report split, heads"
        f" chosen by {_way_of(best)}: what suffers first, and what each recovery brings back. The"
        " darker the red, the more is lost; n is how many examples a kind has."
    )
    return Plot("groups", caption, figure)


def ways_of(table: pd.DataFrame) -> pd.Series:
    """The schedule of every row, with the scorer that it uses."""
    return table.apply(_way_of, axis=1)


def _way_of(row: Any) -> str:
    return str(row["schedule"]) + (f" by {row['scorer']}" if row["scorer"] != row["schedule"] else "")


def _title(recovery: str) -> str:
    return "no recovery" if recovery == NOTHING else recovery


def _places(table: pd.DataFrame) -> dict[int, int]:
    """The place of each size on an axis: the largest first, at equal distances, because the small sizes matter."""
    return {int(kept): i for i, kept in enumerate(sorted(table["heads_kept"].unique(), reverse=True))}


def _shade(site: str, layer: int, sites: Sequence[str]) -> tuple[float, ...]:
    """The colour of a site, lighter from layer to layer."""
    share = 0.75**layer
    colour = COLOURS[sites.index(site) % len(COLOURS)]
    return tuple(1 - share * (1 - channel) for channel in to_rgb(colour))


@needs("order")
def order_of_removal(tables: Tables) -> Plot:
    """At which step every head goes: site and layer × head, a panel per schedule."""
    order = tables["order"]
    rows = sorted(blocks_in(order), key=lambda block: block_order(*block))
    heads, ways = sorted(order["head"].unique()), list(ways_of(order).unique())
    columns = columns_of(len(ways), 4)
    width = max(0.42 * len(heads), 1.9)
    height = 0.6 + (0.6 + 0.32 * len(rows)) * -(-len(ways) // columns)
    figure = Figure(figsize=(2.2 + width * columns, max(height, 2.0)))  # the bar needs room for its words
    grid = panels(figure, len(ways), columns, "head")
    most = int(order["step"].max())
    for axes, way in zip(grid, ways, strict=True):
        steps = order[ways_of(order) == way].pivot_table(index=BLOCK, columns="head", values="step")
        values = steps.reindex(index=rows, columns=heads).to_numpy(float)
        staying = np.isnan(values) & _present(tables, rows, heads)
        names: Any = {"rows": [block_label(*row) for row in rows], "columns": heads}
        shown = np.where(staying, most + 1.0, values)
        image = heat_map(
            axes,
            shown,
            **names,
            write=lambda step: "–" if step > most else number(step, 0),
            vmin=0,
            vmax=most + bool(staying.any()),
        )
        axes.set_title(wrapped(way, width))
    bar_in_words(image, grid, "step at which it goes", "first", "last")
    caption = (
        "The order of removal: the step at which each head goes, 1 first; the darker, the later, and so the more it"
        " matters. A dash: it stays to the end."
    )
    return Plot("order", caption, figure)


def _present(tables: Tables, rows: Sequence[tuple[str, int]], heads: Sequence[int]) -> np.ndarray:
    """Return which heads the whole model has: block × head."""
    kept = tables["recovery"]["kept"] if "recovery" in tables else []
    names = {head for cell in set(kept) for head in head_names(cell)}
    return np.array([[(*row, head) in names for head in heads] for row in rows])
