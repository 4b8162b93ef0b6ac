"""The report of `experiment=ablate`: how many heads can be removed, which heads, and the cost and benefit."""

from collections.abc import Iterator
from math import nan
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from mhaprune.experiments import can_go
from mhaprune.experiments.can_go import caveats, most_removed, surely_words
from mhaprune.reporting import plots
from mhaprune.reporting.head_map import Verdict
from mhaprune.reporting.headline import Number
from mhaprune.reporting.plots import CONTROL_COLOUR, Plot, needs
from mhaprune.reporting.sentences import as_fast, share
from mhaprune.tables import (
    DENSE_AGAIN,
    HEAD,
    NOTHING,
    QUALITY,
    QUARTILES,
    REFERENCE,
    Tables,
    by_block,
    candidates,
    head_names,
    named,
    quality_name,
    repeated_draws,
    timed_name,
)


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences: how many heads can be removed, which heads, the speed-up, and what is uncertain."""
    summary, quality = tables["summary"], quality_name(tables)
    plain = summary["recovery"] == NOTHING
    recovered, best = summary[~plain].to_dict("records"), most_removed(summary[plain]).to_dict()
    total, dense = int(best["heads_total"]), share(best["dense_quality"])
    if best["heads_removed"] > 0:
        yield (
            f"{int(best['heads_removed'])} of {total} heads can go{surely_words(best)}: {share(best[QUALITY])}"
            f" {quality} is left on the report split ({dense} with all)."
        )
        yield f"{_which(best)} All others are kept."
        yield as_fast(best, tables)
    else:
        yield f"None of {total} heads can go within {best['tolerance']:g} of the dense model's {dense} {quality}."
    for row in recovered:
        if row["heads_removed"]:
            yield (
                f"After {row['recovery']} {int(row['heads_removed'])} can go{surely_words(row)}: {share(row[QUALITY])}"
                f" {quality} is left. {_which(row)} {as_fast(row, tables)}"
            )
        else:
            yield f"After {row['recovery']} none can go."
    sure = any(surely_words(row) for row in (best, *recovered) if row["heads_removed"])
    yield from caveats(tables, sure, best["tolerance"], "recovered")


def _which(row: dict[Any, Any]) -> str:
    """Return a sentence that names the removed heads."""
    names = by_block(head_names(row["removed"]))
    return f"They are, as chosen by {row['scorer']} (site.layer: heads, counted from 0), {names}."


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
    title = f"{len(gone)} of {len(heads)} heads removed: {share(best[QUALITY])} {quality_name(tables)} is left"
    if not gone:
        title = f"None of {len(heads)} heads can go at the budgets tried"
    meaning = f"Dashed tiles are heads that were removed together, as chosen by {best['scorer']}; blue ones stay."
    return Verdict(heads, "" if heads["score"].isna().all() else scorer, title, meaning)


def headline(tables: Tables) -> list[Number]:
    """Return three numbers, without recovery and after each recovery: heads that can be removed, quality, speed-up."""
    return can_go.headline(tables["summary"], tables)


@needs("pruning")
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
        label = f"{name} ({curves['draw'].nunique()} draws)"
        axes.plot(band.index, band["mean"], color=CONTROL_COLOUR, linestyle="--", label=label)
    recovered = tables.get("recovered", pd.DataFrame(columns=["recovery", "scorer"]))
    for i, ((name, scorer), curve) in enumerate(recovered.groupby(["recovery", "scorer"], sort=False)):
        look = plots.line_style(names.index(scorer)) if scorer in names else {"color": CONTROL_COLOUR, "marker": "x"}
        look |= {"linestyle": ("--", ":", "-.")[i % 3], "markerfacecolor": "none", "markersize": 7}
        plots.draw_curve(axes, curve, "heads_removed", label=f"{scorer}, then {name}", **look)
    axes.set(xlabel=f"heads removed, of {int(pruning['heads_total'].max())}", ylabel=quality)
    if pruning[QUALITY].between(0, 1).all():  # a share
        axes.set_ylim(-0.03, 1.03)
    axes.set_xticks(sorted(pruning["heads_removed"].unique()))
    plots.legend_above(figure, axes)
    caption = (
        f"{quality.capitalize()} on the report split after the heads that each chose were removed. Bars are 95 %"
        " intervals over examples, a grey line and band the mean and range of a random control. Dashed with open marks:"
        " the same heads gone, and what is left recovered."
    )
    return Plot("accuracy", caption, figure)


@needs("pruning", "latency")
def latency_curves(tables: Tables) -> Plot | None:
    """Draw the measured speed-up over the dense model against heads removed."""
    names = candidates(tables["pruning"])  # one draw of a control would be noise
    pruning = tables["pruning"].query("scorer in @names").dropna(subset="speedup")
    if pruning.empty:
        return None
    figure = Figure(figsize=(7, 4.6))
    axes = figure.add_subplot()
    floor = tables["latency"].set_index("scorer").loc[DENSE_AGAIN, ["speedup_q1", "speedup_q3"]]
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhspan(*floor, color=CONTROL_COLOUR, alpha=0.25, linewidth=0, label="dense against itself")
    total = int(pruning["heads_total"].max())
    for i, name in enumerate(names):
        curve = pruning[pruning["scorer"] == name]
        shift = 0.012 * total * (i - (len(names) - 1) / 2)  # keeps equal points apart
        curve = curve.assign(x=curve["heads_removed"] + shift)
        plots.draw_curve(axes, curve, "x", "speedup", QUARTILES, label=name, **plots.line_style(i))
    axes.set(xlabel=f"heads removed, of {total}", ylabel=f"speed-up of {timed_name(tables)}")
    axes.set_xticks(sorted(pruning["heads_removed"].unique()))
    seen = pd.concat([pruning["speedup"], pd.Series([1.0, *floor])])  # a bar may leave the figure, no mark may
    plots.scale_in_ratios(axes.yaxis, 0.9 * seen.min(), 1.1 * seen.max(), 0.05)
    plots.legend_above(figure, axes)
    caption = (
        f"How many times as fast {timed_name(tables)} is with heads really removed. Bars are quartiles over rounds in"
        " turn, the grey strip is the dense model timed against itself: within it there is no difference to be seen."
    )
    return Plot("latency", caption, figure)
