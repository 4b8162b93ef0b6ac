"""The report of `experiment=prune`: how few heads are enough, and which heads."""

from collections.abc import Iterator
from math import nan
from typing import Any

import pandas as pd

from mhaprune.lab.experiments.shift import group_sentence, shift_sentences
from mhaprune.lab.experiments.tolerance import (
    caveats,
    count_words,
    most_removed,
    numbers_of_summary,
    of_whole,
    removable,
    surely_words,
)
from mhaprune.lab.model.sites import block_order
from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.head_map import Verdict
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.names import in_percent, quality_name, timed_name, unit_name
from mhaprune.lab.reporting.plots import Plot, amount, needs, wrapped
from mhaprune.lab.reporting.sentences import Aside, as_fast, quality_of, right
from mhaprune.tables import CHOOSE_DROP, HEAD, KIND, NOTHING, QUALITY, SURE, Tables, by_block, head_names

BESIDE = " Each mark is beside the whole model on the kind of examples that loses most there."
CONTROL: Any = {"linewidth": 4, "alpha": 0.45, "solid_capstyle": "round", "zorder": 1.5}
"""The line style of the control: broad and behind the other curves, because they often coincide."""


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences: how many heads can be removed, which stay, what each recovery reaches, and what failed."""
    smallest, quality = tables["smallest"], quality_name(tables)
    best = most_removed(smallest[~smallest["control"]])
    kept, total, dense = int(best["heads_kept"]), int(best["heads_total"]), quality_of(best["dense_quality"], tables)
    if best["heads_removed"]:
        first, *others = [row for _, row in _by_recovery(tables) if not row["control"]]
        yield (
            f"{removable(first['heads_removed'], total, tables)} can be removed{_after(first)}"
            + "".join(
                f"{',' if i else ';'} {count_words(row['heads_removed'], tables)}{_after(row)}"
                for i, row in enumerate(others)
            )
            + f" ({right(best[QUALITY], tables)}; {of_whole(best, tables)})."
        )
        if surely_words(best, tables):
            yield f"At 95 % confidence {count_words(best[SURE], tables)} can be removed{_after(best)}."
        after = "" if best["recovery"] == NOTHING else f" and the model was recovered by {best['recovery']}"
        after += f" ({int(best['steps'])} steps of training)" if after and best["steps"] else ""
        yield f"The {int(best['heads_removed'])} were chosen by {_way(best)}{after}."
        if best["control_draws"]:
            least, mean, most = (quality_of(best[f"control_{name}"], tables) for name in ("least", QUALITY, "most"))
            drawn = f" ({least} to {most}, {int(best['control_draws'])} drawn)" if best["control_draws"] > 1 else ""
            yield f"The best shape of that size, trained from scratch for as many steps in all, has {mean}{drawn}."
        yield as_fast(best, tables)
    else:
        yield (
            f"{removable(0, total, tables)} can be removed within {best['tolerance']:g} of the whole model's {quality}"
            f" ({dense}), however they are chosen and whatever is done afterwards."
        )
    if 0 < kept < total:
        which = f"site.layer: {unit_name(tables)}, counted from 0"
        yield Aside(f"These stay ({which}): {by_block(head_names(best['kept']))}.")
    parts = [f"{words} ({quality_of(row[QUALITY], tables)}, {_way(row)})" for words, row in _by_recovery(tables)]
    yield Aside(
        f"Heads that can be removed within {best['tolerance']:g} of {quality} on the choose split, with the {quality}"
        f" on the report split: {', '.join(parts)}."
    )
    yield from group_sentence(tables)
    yield from shift_sentences(tables)
    sure = bool(best["heads_removed"] and surely_words(best, tables))
    yield from caveats(tables, best, sure, "recovery")


def _after(row: pd.Series) -> str:
    """Return the recovery in words: ` after refit`, ` after 300 steps of fine_tune`."""
    if row["recovery"] == NOTHING:
        return ""
    steps = f"{int(row['steps'])} steps of " if row["steps"] else ""
    return f" after {steps}{row['recovery']}"


def _by_recovery(tables: Tables) -> Iterator[tuple[str, pd.Series]]:
    """Yield for each recovery the row with the most heads removed, with words: `18 after refit`."""
    for name, models in tables["smallest"].groupby("recovery", sort=False):
        row = most_removed(models)
        after = f"{'by' if row['control'] else 'after'} {name}" if name != NOTHING else "with nothing done afterwards"
        yield f"{count_words(row['heads_removed'], tables)} {after}", row


def head_map(tables: Tables) -> Verdict:
    """Return the map of the heads that stay in the smallest model within the tolerance. Controls are left out."""
    smallest = tables["smallest"]
    best = most_removed(smallest[~smallest["control"]])
    stays = dict.fromkeys(head_names(best["removed"]), False) | dict.fromkeys(head_names(best["kept"]), True)
    order = sorted(stays, key=lambda name: (*block_order(name.site, name.layer), name.head))
    heads = pd.DataFrame(order, columns=HEAD).assign(score=nan, name="", stays=[stays[name] for name in order])
    title = f"{int(best['heads_removed'])} of {len(heads)} heads removed: {right(best[QUALITY], tables)}"
    if best["recovery"] != NOTHING and not (isinstance(best["note"], str) and best["note"]):
        title += f" after {best['recovery']}"
    if not best["heads_removed"]:
        title = f"{removable(0, len(heads), tables)} can be removed"
    meaning = "Dashed tiles are heads that were removed together; the others stay."
    return Verdict(heads, "", title, meaning, tables=("smallest",))


def headline(tables: Tables) -> list[Number]:
    """Return, for each recovery, three numbers of the smallest model: heads to remove, quality, speed-up. No
    controls."""
    return numbers_of_summary(tables["smallest"][~tables["smallest"]["control"]], tables)


def _way(row: pd.Series) -> str:
    """Return the name of the schedule, with its scorer if it uses one."""
    return str(row["schedule"]) + (f" with {row['scorer']}" if row["scorer"] != row["schedule"] else "")


@needs("recovery", "smallest")
def recovery_curves(tables: Tables) -> Plot:
    """Draw exact match against heads removed: a panel per schedule and scorer, a line per recovery."""
    by_kind, quality = KIND in tables["recovery"], quality_name(tables)
    table = plots.beside_whole(tables["recovery"], by_kind).assign(way=tables["recovery"].apply(_way, axis=1))
    control, recovered = table[table["control"]], table[~table["control"]]
    names, ways, total = (
        list(recovered["recovery"].unique()),
        list(recovered["way"].unique()),
        int(table["heads_total"].max()),
    )
    labels = f"heads removed, of {total}", f"change of {quality}" if by_kind else quality
    smallest, shift = (
        plots.beside_whole(tables["smallest"], by_kind),
        0.008 * total,
    )  # a shift along x keeps coinciding curves apart
    size = (5.4 if len(ways) == 1 else 3.8 if len(ways) == 2 else 3.1, 3.2)
    figure, grid = plots.panelled(len(ways), 3, size, (1.0, 1.3), *labels, sharex=True, sharey=True)
    for axes, way in zip(grid, ways, strict=True):
        for i, (name, drawn) in enumerate(control.groupby("recovery", sort=False)):
            look = CONTROL | {"linestyle": ("-", ":")[i % 2]}
            plots.draw_band(axes, drawn, label=f"{name} (mean and range)", **look)
        for name, curve in recovered[recovered["way"] == way].groupby("recovery", sort=False):
            i = names.index(name)
            x = curve["heads_removed"] + shift * (i - (len(names) - 1) / 2)
            label = "no recovery" if name == NOTHING else name
            plots.draw_curve(axes, curve.assign(x=x), "x", label=label, **plots.line_style(i))
        best = smallest[smallest.apply(_way, axis=1) == way]
        x = best["heads_removed"] + shift * (best["recovery"].map(names.index) - (len(names) - 1) / 2)
        plots.mark_choice(axes, best.assign(x=x), "x")
        axes.set(title=wrapped(way, size[0] - 0.2), xticks=sorted(table["heads_removed"].unique()))
        if in_percent(quality) and not by_kind:
            axes.set_ylim(-0.03, 1.03)
    parts = ", ".join(words for words, _ in _by_recovery(tables))
    within = f"within {smallest['tolerance'].iloc[0]:g} of {quality_name(tables)}"
    handles = {each.get_label(): each for axes in grid for each in axes.get_legend_handles_labels()[0]}
    plots.legend_above(figure, list(handles.values()), f"Heads that can be removed {within}: {parts}")
    caption = (
        f"{quality_name(tables).capitalize()} on the report split against heads removed, one panel for each"
        " way to choose them; bars are 95 % intervals over examples. Rings: the most that loses no more than the"
        " tolerance on the choose split (dotted: here)."
    )
    if by_kind:
        caption += BESIDE
    if len(control):
        caption += " Grey: the best shape of each size trained from random weights for as many steps in all."
    return Plot("recovery", caption, figure)


@needs("recovery", "latency", "smallest")
def worth(tables: Tables) -> Plot | None:
    """Draw exact match against the speed: a line per recovery or control, a mark per number of heads."""
    times = tables["latency"].dropna(subset="speedup").drop_duplicates("removed").set_index("removed")
    by_kind, quality = KIND in tables["recovery"], quality_name(tables)
    table = plots.beside_whole(tables["recovery"], by_kind).query("heads_removed > 0")
    table = table.assign(speedup=times["speedup"].reindex(table["removed"]).to_numpy()).dropna(subset="speedup")
    # The best way to choose heads for each number of heads, so that a line is what each recovery can do.
    if table.empty:
        return None
    figure = plots.new_figure(figsize=(7, 4.4))
    axes = figure.add_subplot()
    dense = plots.beside_whole(tables["smallest"], by_kind).iloc[0]["dense_quality"]
    fewest, reached = table["heads_kept"].min(), list[str]()
    axes.plot([1], [dense], "*", color="black", markersize=13, label="the whole model")
    for i, (name, rows) in enumerate(table.groupby("recovery", sort=False)):
        if rows["control"].any():
            best = rows.groupby("heads_kept")[["speedup", QUALITY]].mean()
        else:
            best = rows.loc[rows.groupby("heads_kept")[CHOOSE_DROP].idxmin()].set_index("heads_kept")
        best = best.sort_values("speedup")
        steps, seconds = rows["steps"].median(), rows["seconds"].median()
        cost = f" ({int(steps)} steps, {amount(seconds, 1)} s)" if name != NOTHING else ""
        label = "pruned" if name == NOTHING else str(name)
        if fewest in best.index:
            value = best.loc[fewest, QUALITY]
            reached.append(f"{label} {plots.number(value, 2) if by_kind else quality_of(value, tables)}")
        look = {**plots.line_style(i), "markersize": 5, "label": f"{label}{cost}"}
        axes.plot(best["speedup"], best[QUALITY], **look)
    label = f"change of {quality}" if by_kind else quality
    axes.set(xlabel=f"times as fast ({timed_name(tables)})", ylabel=label)
    if in_percent(quality) and not by_kind:
        axes.set_ylim(-0.03, 1.03)
    plots.legend_above(figure, axes, f"With {int(fewest)} heads left: {', '.join(reached)}")
    caption = (
        f"{quality_name(tables).capitalize()} on the report split against the speed; higher and further right is"
        " better. A mark is a number of heads, chosen by the way that is best on the choose split; of a"
        " control, it is the mean over its draws. In brackets the steps of training after the removal, or of all"
        " training of a control, and its seconds when it was trained, which were not measured in turn."
    )
    if by_kind:
        caption += BESIDE
    return Plot("worth", caption, figure)
