"""The report of `experiment=prune`: how few heads are enough, and which heads."""

from collections.abc import Iterator
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb

from mhaprune.experiments import can_go
from mhaprune.experiments.can_go import caveats, most_removed, surely_words
from mhaprune.heads import SITES, block_label
from mhaprune.reporting import plots
from mhaprune.reporting.head_map import Verdict
from mhaprune.reporting.headline import Number
from mhaprune.reporting.plots import COLOURS, CONTROL_COLOUR, Plot, needs, wrapped
from mhaprune.reporting.sentences import as_fast, share
from mhaprune.tables import HEAD, NOTHING, QUALITY, Tables, block_order, by_block, head_names, quality_name

SIZES = "heads kept (fewer to the right)"
CONTROL: Any = {"color": CONTROL_COLOUR, "linewidth": 8, "alpha": 0.45, "solid_capstyle": "round", "zorder": 1.5}
"""The line style of the control: broad and behind the other curves, because they often coincide."""


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences: how few heads are enough, which heads, what each recovery needs, and what failed."""
    smallest, quality = tables["smallest"], quality_name(tables)
    best = most_removed(smallest[~smallest["control"]])
    kept, total, dense = int(best["heads_kept"]), int(best["heads_total"]), share(best["dense_quality"])
    if best["heads_removed"]:
        yield (
            f"{kept} of {total} heads {'is' if kept == 1 else 'are'} enough{surely_words(best, kept=True)}:"
            f" {share(best[QUALITY])} {quality} is left on the report split ({dense} with all)."
        )
        after = "" if best["recovery"] == NOTHING else f" and recovered by {best['recovery']}"
        after += f" ({int(best['steps'])} steps of training)" if after and best["steps"] else ""
        yield f"They were chosen by {_way(best)}{after}."
        if best["control_draws"]:
            least, mean, most = (share(best[f"control_{name}"]) for name in ("least", QUALITY, "most"))
            drawn = f" ({least} to {most}, {int(best['control_draws'])} drawn)" if best["control_draws"] > 1 else ""
            yield f"The best shape of that size, trained from scratch for as many steps in all, reaches {mean}{drawn}."
        yield as_fast(best, tables)
    else:
        yield (
            f"None of {total} heads can go within {best['tolerance']:g} of the dense model's {dense} {quality},"
            " however they are chosen and whatever is done afterwards."
        )
    if 0 < kept < total:
        yield f"They are (site.layer: heads, counted from 0) {by_block(head_names(best['kept']))}."
    parts = []
    for name, rows in smallest.groupby("recovery", sort=False):
        row = most_removed(rows)
        after = name if row["control"] else f"after {name}"
        after = "with nothing done afterwards" if name == NOTHING else after
        parts.append(f"{row['heads_kept']} {after} ({share(row[QUALITY])}, {_way(row)})")
    yield (
        f"The fewest heads within {best['tolerance']:g} of {quality} on the choose split, and what is left"
        f" on the report split: {', '.join(parts)}."
    )
    sure = bool(best["heads_removed"] and surely_words(best))
    yield from caveats(tables, sure, best["tolerance"], "recovery")


def head_map(tables: Tables) -> Verdict:
    """Return the map of the heads that stay in the smallest model within the tolerance. Controls are left out."""
    smallest = tables["smallest"]
    best = most_removed(smallest[~smallest["control"]])
    stays = dict.fromkeys(head_names(best["removed"]), False) | dict.fromkeys(head_names(best["kept"]), True)
    order = sorted(stays, key=lambda name: (*block_order(name.site, name.layer), name.head))
    heads = pd.DataFrame(order, columns=HEAD).assign(score=nan, name="", stays=[stays[name] for name in order])
    title = f"{int(best['heads_kept'])} of {len(heads)} heads are enough: {share(best[QUALITY])} {quality_name(tables)}"
    if best["recovery"] != NOTHING and not (isinstance(best["note"], str) and best["note"]):
        title += f" after {best['recovery']}"
    return Verdict(heads, "", title, "Dashed tiles are heads that were removed together; blue ones stay.")


def headline(tables: Tables) -> list[Number]:
    """Return, for each recovery, three numbers of the smallest model: heads to remove, quality, speed-up. No
    controls."""
    return can_go.headline(tables["smallest"][~tables["smallest"]["control"]], tables)


def _way(row: pd.Series) -> str:
    """Return the name of the schedule, with its scorer if it uses one."""
    return str(row["schedule"]) + (f" with {row['scorer']}" if row["scorer"] != row["schedule"] else "")


@needs("recovery")
def recovery_curves(tables: Tables) -> Plot:
    """Draw exact match against heads kept: a panel per recovery, a line per schedule and scorer, controls in grey."""
    table = tables["recovery"].assign(way=tables["recovery"].apply(_way, axis=1))
    control, own = table[table["control"]], table[~table["control"]]
    names, ways, place = list(own["recovery"].unique()), list(own["way"].unique()), _places(table)
    labels = SIZES, quality_name(tables)
    figure, grid = plots.panelled(len(names), 3, (3.6, 3.0), (1.0, 1.0), *labels, sharex=True, sharey=True)
    for axes, name in zip(grid, names, strict=True):
        if len(control):
            band = control.groupby("heads_kept")[QUALITY].agg(["min", "mean", "max"]).sort_index()
            where = [place[kept] for kept in band.index]
            axes.fill_between(where, band["min"], band["max"], color=CONTROL_COLOUR, alpha=0.25, linewidth=0)
            label = f"{control['recovery'].iloc[0]} (mean and range)"
            axes.plot(where, band["mean"], label=label, **CONTROL)
        for way, curve in own[own["recovery"] == name].groupby("way", sort=False):
            i = ways.index(way)
            # A shift along x keeps coinciding curves apart.
            x = curve["heads_kept"].map(place) + 0.08 * (i - (len(ways) - 1) / 2)
            plots.draw_curve(axes, curve.assign(x=x), "x", label=way, **plots.line_style(i))
        axes.set(title=wrapped("no recovery" if name == NOTHING else name, 3.4), ylim=(-0.03, 1.03))
        axes.set_xticks(range(len(place)), list(map(str, place)))
    plots.legend_above(figure, grid[0])
    caption = (
        f"{quality_name(tables).capitalize()} on the report split against heads left, one panel for each"
        " recovery; bars are 95 % intervals over examples. All sizes that were measured stand at equal distances."
    )
    if len(control):
        caption += " Grey: the best shape of each size trained from random weights for as many steps in all."
    return Plot("recovery", caption, figure)


@needs("recovery")
def survivors(tables: Tables) -> Plot | None:
    """Draw the number of heads left in each block at each model size: a panel per schedule and scorer."""
    own = tables["recovery"][~tables["recovery"]["control"]]
    choices = dict[str, pd.Series]()
    for (_, _, recovery), models in own.groupby(["schedule", "scorer", "recovery"], sort=False):
        way, kept = _way(models.iloc[0]), models.set_index("heads_kept")["kept"]
        if way not in choices:
            choices[way] = kept
        elif kept.to_dict() != choices[way].to_dict():  # a recovery between the budgets changes the choice
            choices[f"{way},\n{recovery}"] = kept
    place = _places(own)
    blocks = {(head.site, head.layer) for kept in own["kept"] for head in head_names(kept)}
    if not blocks:
        return None
    sites = list(dict.fromkeys([*SITES, *sorted(site for site, _ in blocks)]))  # mhaprune's sites keep their colours
    labels = SIZES, "heads in each block"
    figure, grid = plots.panelled(len(choices), 4, (2.9, 2.6), (1.2, 1.0), *labels, sharex=True, sharey=True)
    for axes, (way, models) in zip(grid, choices.items(), strict=True):
        x, bottom = models.index.map(place), np.zeros(len(models))
        for site, layer in sorted(blocks, key=lambda block: block_order(*block)):
            counts = np.array([sum(head[:2] == (site, layer) for head in head_names(kept)) for kept in models])
            paler = 1 - 0.75**layer
            colour = [paler + (1 - paler) * channel for channel in to_rgb(COLOURS[sites.index(site) % len(COLOURS)])]
            axes.bar(x, counts, 0.85, bottom, color=colour, edgecolor="white", label=block_label(site, layer))
            bottom += counts
        axes.set_title("\n".join(wrapped(line, 2.7) for line in way.splitlines()))
        axes.set_xticks(range(len(place)), list(map(str, place)))
        axes.grid(visible=False, axis="x")
    plots.legend_above(figure, grid[0])
    caption = (
        "Which heads survive: the number of heads left in each block, by the size of the model; the lighter, the higher"
        " the layer. After Voita et al. 2019, figure 8."
    )
    return Plot("survivors", caption, figure)


def _places(table: pd.DataFrame) -> dict[int, int]:
    """Return the place of each number of kept heads on an axis: largest first, equally spaced, as small ones matter."""
    return {int(kept): i for i, kept in enumerate(sorted(table["heads_kept"].unique(), reverse=True))}
