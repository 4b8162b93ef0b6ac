"""The report of `experiment=ablate`: how many heads can be removed, which heads, and the cost and benefit."""

from collections.abc import Iterator, Mapping
from math import nan
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from mhaprune.experiments import can_go
from mhaprune.experiments.can_go import caveats, count_words, most_removed, removable, surely_words
from mhaprune.experiments.shift import say_shift
from mhaprune.reporting import plots
from mhaprune.reporting.head_map import Verdict
from mhaprune.reporting.headline import Number
from mhaprune.reporting.plots import CONTROL_COLOUR, Plot, needs
from mhaprune.reporting.sentences import as_fast, right, share
from mhaprune.tables import (
    DENSE_AGAIN,
    HEAD,
    NOTHING,
    QUALITY,
    QUARTILES,
    REFERENCE,
    SURE,
    Tables,
    by_block,
    candidates,
    head_names,
    named,
    quality_name,
    repeated_draws,
    timed_name,
    unit_name,
)


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences: how many heads can be removed, the speed-up, which heads, and what is uncertain."""
    summary, units = tables["summary"], unit_name(tables)
    plain = summary["recovery"] == NOTHING
    recovered, best = summary[~plain].to_dict("records"), most_removed(summary[plain]).to_dict()
    total, dense = int(best["heads_total"]), best["dense_quality"]
    if best["heads_removed"] > 0:
        yield (
            f"{removable(best['heads_removed'], total, tables)} can be removed:"
            f" {right(best[QUALITY], tables, 'still ')} ({share(dense)} with all {units})."
        )
        if surely_words(best, tables):
            yield f"At 95 % confidence {count_words(best[SURE], tables)} can be removed."
        yield as_fast(best, tables)
    else:
        yield (
            f"{removable(0, total, tables)} can be removed within {best['tolerance']:g} of the whole model's"
            f" {quality_name(tables)} ({share(dense)})."
        )
    for row in recovered:
        if row["heads_removed"]:
            yield (
                f"After {row['recovery']} {int(row['heads_removed'])} can be removed{_surely(row, tables)}:"
                f" {right(row[QUALITY], tables)}. {as_fast(row, tables)}"
            )
        else:
            yield f"After {row['recovery']} {count_words(0, tables)} can be removed."
    for row in (best, *recovered):
        if row["heads_removed"]:
            yield _which(row)
    yield from say_shift(tables)
    sure = any(surely_words(row, tables) for row in (best, *recovered) if row["heads_removed"])
    yield from caveats(tables, best, sure, "recovered")


def _surely(row: Mapping[str, Any], tables: Tables) -> str:
    """Return ` (12 at 95 % confidence)`; empty if not known."""
    words = surely_words(row, tables)
    return f" ({words})" if words else ""


def _which(row: dict[Any, Any]) -> str:
    """Return a sentence that names the removed heads."""
    names, after = by_block(head_names(row["removed"])), row["recovery"]
    which = "" if after == NOTHING else f" before {after}"
    return f"The heads removed{which}, as chosen by {row['scorer']} (site.layer: heads, counted from 0): {names}."


def head_map(tables: Tables) -> Verdict:
    """Return the map of the largest set of heads that can be removed together."""
    best = most_removed(tables["summary"].query("recovery == @NOTHING"))
    scores = tables["heads"][tables["heads"]["draw"] == 0]
    scorer = REFERENCE if REFERENCE in set(scores["scorer"]) else best["scorer"]
    own = scores[scores["scorer"] == scorer]
    if own.empty:  # chosen by a schedule that needs no scorer
        own = scores.drop_duplicates(HEAD).assign(score=nan)
    heads = own[[*HEAD, "score"]].assign(name="")
    gone = set(head_names(best["removed"]))
    heads["stays"] = [head not in gone for head in named(heads)]
    units = unit_name(tables)
    title = f"{len(gone)} of {len(heads)} {units} removed: {right(best[QUALITY], tables)}"
    if not gone:
        title = f"{removable(0, len(heads), tables)} can be removed"
    meaning = f"Dashed tiles are {units} that were removed together, as chosen by {best['scorer']}; blue ones stay."
    named_scorer = "" if heads["score"].isna().all() else scorer
    return Verdict(heads, named_scorer, title, meaning, tables=("summary", "heads"))


def headline(tables: Tables) -> list[Number]:
    """Return three numbers, without recovery and after each recovery: heads that can be removed, quality, speed-up."""
    return can_go.headline(tables["summary"], tables)


@needs("pruning", "summary")
def accuracy_curves(tables: Tables) -> Plot:
    """Draw the quality against the number of removed heads: a line per scorer, and a band for a random control."""
    pruning, quality = tables["pruning"], quality_name(tables)
    names = candidates(pruning)
    figure = Figure(figsize=(7, 4.6))
    axes = figure.add_subplot()
    for i, name in enumerate(names):
        curve = pruning[pruning["scorer"] == name]
        plots.draw_curve(axes, curve, "heads_removed", label=name, markersize=5, **plots.line_style(i))
    for name in repeated_draws(pruning):
        curves = pruning[pruning["scorer"] == name]
        band = curves.groupby("heads_removed")[QUALITY].agg(["min", "mean", "max"])
        axes.fill_between(band.index, band["min"], band["max"], color=CONTROL_COLOUR, alpha=0.2, linewidth=0)
        label = f"{name} (mean and range of {curves['draw'].nunique()})"
        axes.plot(band.index, band["mean"], color=CONTROL_COLOUR, linestyle="--", label=label)
    recovered = tables.get("recovered", pd.DataFrame(columns=["recovery", "scorer"]))
    for i, ((name, scorer), curve) in enumerate(recovered.groupby(["recovery", "scorer"], sort=False)):
        look = plots.line_style(names.index(scorer)) if scorer in names else {"color": CONTROL_COLOUR, "marker": "x"}
        look |= {"linestyle": ("--", ":", "-.")[i % 3], "markerfacecolor": "none", "markersize": 7}
        plots.draw_curve(axes, curve, "heads_removed", label=f"{scorer}, then {name}", **look)
    axes.set(xlabel=f"{unit_name(tables)} removed, of {int(pruning['heads_total'].max())}", ylabel=quality)
    if pruning[QUALITY].between(0, 1).all():  # a share
        axes.set_ylim(-0.03, 1.03)
    axes.set_xticks(sorted(pruning["heads_removed"].unique()))
    units, rows = unit_name(tables), [most_removed(own) for _, own in tables["summary"].groupby("recovery", sort=False)]
    within = f"can be removed within {rows[0]['tolerance']:g} of {quality}"
    title = f"{removable(rows[0]['heads_removed'], int(rows[0]['heads_total']), tables)} {within}"
    parts = [
        title,
        *(
            f"{count_words(row['heads_removed'], tables)} after {plots.elided(str(row['recovery']))}"
            for row in rows[1:]
        ),
    ]
    axes.set_title(plots.wrapped(", ".join(parts), 6.5))
    plots.legend_above(figure, axes)
    caption = (
        f"{quality.capitalize()} on the report split without the {units} that each score ranks lowest. Bars"
        " are 95 % intervals over examples. Dashed with open marks: the same removed, and what is left recovered."
    )
    return Plot("accuracy", caption, figure)


@needs("pruning", "latency", "summary")
def latency_curves(tables: Tables) -> Plot | None:
    """Draw the speed-up over the whole model against heads removed: a line for the scorer of the summary, small marks
    for the others, which would lie on it, because time depends on the number of heads more than on which they are."""
    pruning = tables["pruning"]
    pruning = pruning[pruning["scorer"].isin(candidates(pruning))].dropna(subset="speedup")  # not one draw of a control
    if pruning.empty:
        return None
    best = most_removed(tables["summary"])
    first = best["scorer"] if best["scorer"] in set(pruning["scorer"]) else pruning["scorer"].iloc[0]
    figure = Figure(figsize=(7, 4.2))
    axes = figure.add_subplot()
    floor = tables["latency"].set_index("scorer").loc[DENSE_AGAIN, ["speedup_q1", "speedup_q3"]]
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhspan(*floor, color=CONTROL_COLOUR, alpha=0.25, linewidth=0, label="noise: the whole model against itself")
    own, others = pruning[pruning["scorer"] == first], pruning[pruning["scorer"] != first].query("heads_removed > 0")
    look: Any = {"label": f"chosen by {first}", **plots.line_style(0)}
    plots.draw_curve(axes, own, "heads_removed", "speedup", QUARTILES, **look)
    if len(others):
        look = {"color": "#555555", "markersize": 5, "label": "by another score"}
        axes.plot(others["heads_removed"], others["speedup"], "x", **look)
    units, total = unit_name(tables), int(pruning["heads_total"].max())
    axes.set(xlabel=f"{units} removed, of {total}", ylabel="times as fast (logarithmic axis)")
    axes.set_xticks(sorted(pruning["heads_removed"].unique()))
    seen = pd.concat([others["speedup"], *(own[f"speedup{end}"] for end in QUARTILES), pd.Series([1.0, *floor])])
    plots.scale_in_ratios(axes.yaxis, 0.95 * seen.min(), 1.05 * seen.max(), 0.05)
    marked: dict[float, tuple[pd.Series, str]] = {}
    for recovery, rows in tables["summary"].query("heads_removed > 0").groupby("recovery", sort=False):
        marked.setdefault((row := most_removed(rows))["heads_removed"], (row, str(recovery)))
    for row, recovery in marked.values():
        words = f"{row['speedup']:.2f} times{'' if recovery == NOTHING else f', {recovery}'}"
        side: Any = {"ha": "right", "va": "bottom"} if row["heads_removed"] > 0.8 * total else {"va": "top"}
        where = (-4, 6) if "ha" in side else (5, -5)
        look = {"textcoords": "offset points", "fontweight": "bold", **side}
        axes.annotate(words, (row["heads_removed"], row["speedup"]), where, **look)
    gains = []
    for row, recovery in marked.values():
        without = f"without {int(row['heads_removed'])}{f' {units}' if recovery == NOTHING else f' after {recovery}'}"
        noisy = floor.iloc[0] <= row["speedup_q3"] and row["speedup_q1"] <= floor.iloc[1]
        gains.append(f"{row['speedup']:.2f} {without}{' (within the noise)' if noisy else ''}")
    plots.legend_above(figure, axes, f"Times as fast: {', '.join(gains)}" if gains else "")
    caption = (
        f"How many times as fast {timed_name(tables)} is with {units} really removed. Bars are quartiles over rounds in"
        " which all models take turns; within the grey strip there is no difference to be seen. Numbers stand at the"
        f" most that can be removed within {best['tolerance']:g} of {quality_name(tables)}."
    )
    return Plot("latency", caption, figure)
