"""The report of `experiment=speed`: speed-up by heads removed, and accuracy against time."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from mhaprune.reporting import plots
from mhaprune.reporting.headline import Number
from mhaprune.reporting.plots import CONTROL_COLOUR, Plot, needs
from mhaprune.reporting.sentences import right, share
from mhaprune.tables import CHOOSE_QUALITY, QUALITY, QUARTILES, Tables, candidates, quality_name, timed_name

SIZE = ["batch_size", "source_length", "target_length"]
NOISE = Line2D([], [], color=CONTROL_COLOUR, alpha=0.4, linewidth=7, label="noise: the whole model against itself")


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences: the speed-up at several sizes, a comparison with models built small, the fastest good model."""
    if "speed" in tables:
        half = at_half(tables["speed"])
        best, least = half.loc[half["speedup"].idxmax()], half.loc[half["speedup"].idxmin()]
        line = f"{_with_half(best)}, {timed_name(tables)} is {best['speedup']:.2f} times as fast at {_where(best)}"
        if len(half) > 1:
            if best["batch_size"] == least["batch_size"]:
                line = line.removesuffix(f" {_batch(best)}")  # is said once, at the end
            line += f" and {least['speedup']:.2f} times at {_where(least)}"
        yield f"{line}."
        for row in [best, least][: len(half)]:
            line = f"At {_where(row)} it has {_quartiles(row, 'speedup')}, the whole model against itself"
            line += f" {_quartiles(row, 'aa_ratio').removeprefix('quartiles ')}."
            if row["speedup_q1"] > row["flop_ratio"]:
                line += (
                    f" By its operations it would be {row['flop_ratio']:.2f} times as fast: more is noise or caching."
                )
            yield line
        removed = tables["speed"].query("heads_removed > 0")
        ratios = removed["built_ratio"]
        yield (
            f"A model with heads removed takes {ratios.median():.3f} times as long as one built with as few heads"
            f" (median over {len(removed)} sizes and budgets), and at worst {ratios.max():.3f} times."
        )
    for _, rows in tables["tradeoff"].groupby("batch_size", sort=False):
        yield _tradeoff(rows, tables)


def headline(tables: Tables) -> list[Number]:
    """Return the largest speed-up of fresh models with about half of the heads removed; NaN if none were timed."""
    what = "times as fast with half of the heads"
    if "speed" not in tables:
        return [Number(what, math.nan, 1.0, least=0.0)]
    row = at_half(tables["speed"]).nlargest(1, "speedup").iloc[0]
    beside = f"quartiles {row['speedup_q1']:.2f} to {row['speedup_q3']:.2f}; width {row['timed_d_model']}"
    return [Number(what, float(row["speedup"]), 1.0, least=0.0, beside=f"{beside}, batch {row['batch_size']}")]


def at_half(speed: pd.DataFrame) -> pd.DataFrame:
    """Return the rows where the share of removed heads is nearest to one half."""
    off_half = (speed["heads_removed"] / speed["heads_total"] - 0.5).abs()
    return speed[off_half == off_half.min()]


def _with_half(row: pd.Series) -> str:
    """Return the share of heads that stay in words: "With half of the heads"."""
    left, total = int(row["heads_total"] - row["heads_removed"]), int(row["heads_total"])
    return f"With {'half of the' if 2 * left == total else f'{left} of {total}'} heads"


def _where(row: pd.Series) -> str:
    """Return a size in words."""
    return f"width {int(row['timed_d_model'])} {_batch(row)}"


def _batch(row: pd.Series) -> str:
    return f"(batch {int(row['batch_size'])})"


def without_controls(tradeoff: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """Return the rows of scorers that are not random, because a single random draw is noise; all rows if no scorer is
    left."""
    choices = tradeoff[tradeoff["scorer"].isin(candidates(tables.get("pruning", tradeoff)))]
    return choices if len(choices) else tradeoff


def _tradeoff(rows: pd.DataFrame, tables: Tables) -> str:
    """Return in words the fastest model that loses at most 0.01 of quality on the choose split."""
    rows = without_controls(rows, tables)
    dense, best, quality = rows[rows["heads_removed"] == 0].iloc[0], _fastest(rows), quality_name(tables)
    among = f"Of the trained model at batch {int(best['batch_size'])}, within 0.01 of {quality} on the choose split,"
    if best["heads_removed"] == 0:
        return f"{among} none is clearly faster than the whole one: the lower quartile of no speed-up is above 1."
    noise = ""
    if best["speedup_q1"] <= best["aa_ratio_q3"]:
        noise = f" That is no clear gain: the whole one against itself has {_quartiles(best, 'aa_ratio')}."
    return (
        f"{among} the fastest has {int(best['heads_removed'])} of {int(best['heads_total'])} heads removed by"
        f" {best['scorer']}: {best['latency_ms']:.2f} ms instead of {dense['latency_ms']:.2f},"
        f" {best['speedup']:.2f} times as fast ({_quartiles(best, 'speedup')}), and {right(best[QUALITY], tables)}"
        f" ({share(dense[QUALITY])} with all heads).{noise}"
    )


def _fastest(rows: pd.DataFrame) -> pd.Series:
    """Return the fastest model that loses at most 0.01 of quality on the choose split. Fastest means the largest lower
    quartile of the speed-up, because the largest of many medians is large by luck."""
    dense = rows[rows["heads_removed"] == 0].iloc[0]
    good = rows[rows[CHOOSE_QUALITY] >= dense[CHOOSE_QUALITY] - 0.01]
    return good.loc[good["speedup_q1"].idxmax()]


def _quartiles(row: pd.Series, name: str) -> str:
    return f"quartiles {row[f'{name}_q1']:.2f} to {row[f'{name}_q3']:.2f}"


@needs("speed")
def speedup_curves(tables: Tables) -> Plot:
    """Draw the speed-up against heads removed: a panel per size of the input, a line per width. A model without any
    head is left out, because it is useless and much faster."""
    speed = tables["speed"]
    lines = speed.query("heads_removed < heads_total")
    sizes, widths = list(lines.groupby(SIZE, sort=False)), list(lines["timed_d_model"].unique())
    xlabel = f"heads removed, of {int(speed['heads_total'].max())}"
    figure, grid = plots.panelled(len(sizes), 3, (3.8, 3.0), (1.0, 1.2), xlabel, "times as fast", sharey=True)
    for axes, (_, rows) in zip(grid, sizes, strict=True):
        _draw_noise(axes, rows)
        for n, width in enumerate(widths):
            line, look = rows[rows["timed_d_model"] == width], plots.line_style(n)
            plots.draw_curve(axes, line, "heads_removed", "speedup", QUARTILES, markersize=5, **look)
        axes.set_xticks(sorted(rows["heads_removed"].unique()))
        axes.set_title(_size(rows.iloc[0], speed))
        axes.tick_params(labelbottom=True)
    looks = [Line2D([], [], label=f"width {width}", **plots.line_style(n)) for n, width in enumerate(widths)]
    half = at_half(speed)
    gain = f"{half['speedup'].min():.2f} to {half['speedup'].max():.2f} times as fast"
    plots.legend_above(figure, [*looks, NOISE], f"{_with_half(half.iloc[0])}, {timed_name(tables)} is {gain}")
    caption = (
        f"How many times as fast {timed_name(tables)} is when heads are really removed, evenly from all blocks, against"
        " the whole model in turn. Bars are quartiles over rounds. Within the grey strip, the widest of all widths,"
        " there is no difference to be seen. The model without any head is left out."
    )
    return Plot("speedup", caption, figure)


def _draw_noise(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the strip within which the whole model lies when it is timed against itself."""
    look: Any = {"color": CONTROL_COLOUR, "alpha": 0.25, "linewidth": 0}
    axes.axhspan(rows["aa_ratio_q1"].min(), rows["aa_ratio_q3"].max(), **look)


@needs("tradeoff")
def accuracy_milliseconds(tables: Tables) -> Plot:
    """Draw exact match against the speed-up of the trained model, and name the points that no other beats."""
    tradeoff = without_controls(tables["tradeoff"], tables)
    best = tradeoff[QUALITY].max()
    tradeoff = tradeoff[tradeoff[QUALITY] >= best - abs(best) / 2]
    batches, names = list(tradeoff["batch_size"].unique()), list(tradeoff["scorer"].unique())
    labels = "times as fast", quality_name(tables)
    figure, grid = plots.panelled(len(batches), 2, (4.4, 3.7), (0.8, 0.9), *labels, sharey=True)
    for axes, batch_size in zip(grid, batches, strict=True):
        models = tradeoff[tradeoff["batch_size"] == batch_size]
        whole = models[models["heads_removed"] == 0].iloc[0]
        axes.axvspan(whole["aa_ratio_q1"], whole["aa_ratio_q3"], color=CONTROL_COLOUR, alpha=0.25, linewidth=0)
        for i, name in enumerate(names):
            points = models[models["scorer"] == name]
            style: Any = plots.line_style(i) | {"label": name, "linestyle": "", "elinewidth": 1, "capsize": 2}
            bars = plots.errors(points, "speedup", QUARTILES)
            axes.errorbar(points["speedup"], points[QUALITY], xerr=bars, markersize=5, **style)
        axes.set_title(f"batch {batch_size}: whole model {whole['latency_ms']:.2f} ms")
        axes.margins(x=0.1, y=0.12)
        axes.tick_params(labelbottom=True)
        where: Any = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontweight": "bold"}
        for removed, *place in unbeaten(models)[["heads_removed", "speedup", QUALITY]].itertuples(index=False):
            axes.annotate(str(removed), tuple(place), (0, 6), **where)
    fastest = [_fastest(rows) for _, rows in tradeoff.groupby("batch_size", sort=False)]
    gains = (f"{row['speedup']:.2f} times as fast at batch {row['batch_size']}" for row in fastest)
    title = f"Within 0.01 of {quality_name(tables)}: {' and '.join(gains)}"
    plots.legend_above(figure, [*grid[0].get_legend_handles_labels()[0], NOISE], title)
    caption = (
        f"{quality_name(tables).capitalize()} of the model on the report split against how many times as fast"
        f" {timed_name(tables)} is with heads really removed; models that keep less than half of it are left out."
        " Numbers are the heads removed from models that no other beats in both. Bars are quartiles over rounds; within"
        " the grey strip there is no difference to be seen."
    )
    return Plot("tradeoff", caption, figure)


def unbeaten(models: pd.DataFrame) -> pd.DataFrame:
    """Return the models that no other beats in both speed and quality on the report split, the fastest first. Of those
    that are almost equal in both, only the fastest is returned: their names would cover each other."""
    order = models.sort_values(["speedup", QUALITY], ascending=False, kind="stable")
    front = order[order[QUALITY] > order[QUALITY].astype(float).cummax().shift(fill_value=-math.inf)]
    room = 0.06 * np.ptp(models[["speedup", QUALITY]].to_numpy(), axis=0)
    places = front[["speedup", QUALITY]].to_numpy()
    apart = [bool((np.abs(place - places[:i]) > room).any(axis=1).all()) for i, place in enumerate(places)]
    return front[apart].drop_duplicates("heads_removed", keep="last")


def _size(size: Any, frame: pd.DataFrame) -> str:
    """Return the batch size in words, with the lengths if they differ in the table."""
    label = f"batch {size.batch_size}"
    if len(frame[SIZE[1:]].drop_duplicates()) > 1:
        label += f", {size.source_length} → {size.target_length} tokens"
    return label
