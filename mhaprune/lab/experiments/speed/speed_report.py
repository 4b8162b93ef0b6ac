"""The report of `experiment=speed`: the speed-up by heads removed, and what the fastest good model reaches."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.names import quality_name, timed_name, unit_name
from mhaprune.lab.reporting.plots import CONTROL_COLOUR, Plot, needs
from mhaprune.lab.reporting.sentences import Aside, quality_of, right
from mhaprune.tables import CHOOSE_QUALITY, QUALITY, QUARTILES, Tables, candidates

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
        yield f"{line}.{_if_noise(best)}"
        for row in [best, least][: len(half)]:
            line = f"At {_where(row)} it has {_quartiles(row, 'speedup')}, the whole model against itself"
            line += f" {_quartiles(row, 'aa_ratio').removeprefix('quartiles ')}."
            if row["speedup_q1"] > row["flop_ratio"]:
                line += (
                    f" By its operations it would be {row['flop_ratio']:.2f} times as fast: more is noise or caching."
                )
            yield Aside(line)
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
    beside = f"no clear gain; {beside}" if _if_noise(row) else beside
    return [Number(what, float(row["speedup"]), 1.0, least=0.0, beside=f"{beside}, batch {row['batch_size']}")]


def at_half(speed: pd.DataFrame) -> pd.DataFrame:
    """Return the rows where the share of removed heads is nearest to one half."""
    off_half = (speed["heads_removed"] / speed["heads_total"] - 0.5).abs()
    return speed[off_half == off_half.min()]


def _with_half(row: pd.Series) -> str:
    """Return the share of heads that stay in words: "With half of the heads"."""
    kept, total = int(row["heads_total"] - row["heads_removed"]), int(row["heads_total"])
    return f"With {'half of the' if 2 * kept == total else f'{kept} of {total}'} heads"


def _where(row: pd.Series) -> str:
    """Return a size in words."""
    return f"width {int(row['timed_d_model'])} {_batch(row)}"


def _batch(row: pd.Series) -> str:
    return f"(batch {int(row['batch_size'])})"


def _tradeoff(rows: pd.DataFrame, tables: Tables) -> str:
    """Return in words the fastest model that loses at most 0.01 of quality on the choose split."""
    choices = rows[rows["scorer"].isin(candidates(tables.get("pruning", rows)))]
    rows = choices if len(choices) else rows  # a single random draw is noise
    dense, best, quality = rows[rows["heads_removed"] == 0].iloc[0], _fastest(rows), quality_name(tables)
    among = f"Of the trained model at batch {int(best['batch_size'])}, within 0.01 of {quality} on the choose split,"
    if best["heads_removed"] == 0:
        return f"{among} none is clearly faster than the whole one: the lower quartile of no speed-up is above 1."
    return (
        f"{among} the fastest has {int(best['heads_removed'])} of {int(best['heads_total'])} {unit_name(tables)}"
        f" removed by {best['scorer']}: {best['latency_ms']:.2f} ms instead of {dense['latency_ms']:.2f},"
        f" {best['speedup']:.2f} times as fast ({_quartiles(best, 'speedup')}), and {right(best[QUALITY], tables)}"
        f" ({quality_of(dense[QUALITY], tables)} with all {unit_name(tables)}).{_if_noise(best)}"
    )


def _if_noise(row: pd.Series) -> str:
    """Return a sentence if a speed-up may be noise; else nothing."""
    clear = row["speedup_q1"] > row["aa_ratio_q3"]
    return "" if clear else f" That is no clear gain: the whole one against itself has {_quartiles(row, 'aa_ratio')}."


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
    strip: Any = {"color": CONTROL_COLOUR, "alpha": 0.25, "linewidth": 0}  # the whole model against itself
    for axes, (_, rows) in zip(grid, sizes, strict=True):
        axes.axhspan(rows["aa_ratio_q1"].min(), rows["aa_ratio_q3"].max(), **strip)
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


def _size(size: Any, frame: pd.DataFrame) -> str:
    """Return the batch size in words, with the lengths if they differ in the table."""
    label = f"batch {size.batch_size}"
    if len(frame[SIZE[1:]].drop_duplicates()) > 1:
        label += f", {size.source_length} → {size.target_length} tokens"
    return label
