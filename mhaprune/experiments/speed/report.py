"""The report of `experiment=speed`: speed-up by heads removed, accuracy against time, and time by part."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from mhaprune.reporting import plots
from mhaprune.reporting.headline import Number
from mhaprune.reporting.plots import COLOURS, CONTROL_COLOUR, Plot, needs
from mhaprune.reporting.sentences import right, share
from mhaprune.tables import CHOOSE_QUALITY, QUALITY, QUARTILES, Tables, candidates, quality_name, timed_name

WHAT = {"encoder": "encoder", "decoder": "decoder, KV cache", "both": "encoder and decoder"}
SIZE = ["batch_size", "source_length", "target_length"]
PART_COLOURS = {"attention": COLOURS[4], "feed_forward": COLOURS[5], "rest": CONTROL_COLOUR}
BUILT: Any = {"color": "black", "marker": "_", "markersize": 11, "linestyle": ""}
FRONT: Any = {"color": "black", "linewidth": 1, "marker": "o", "markersize": 10, "markerfacecolor": "none", "zorder": 1}


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences: the speed-up at several sizes, a comparison with models built small, the fastest good model."""
    if "speed" in tables:
        half = at_half(tables["speed"])
        best, least = half.loc[half["speedup"].idxmax()], half.loc[half["speedup"].idxmin()]
        line = (
            f"With {int(best['model_heads_removed'])} of {int(best['model_heads'])} heads removed greedy decoding is"
            f" {best['speedup']:.2f} times as fast at {_where(best)}"
        )
        yield line + (f", and least at {_where(least)}: {least['speedup']:.2f} times." if len(half) > 1 else ".")
        removed = tables["speed"].query("heads_removed > 0")
        ratios = removed["built_ratio"]
        yield (
            f"Removal takes {ratios.median():.3f} of the time of models built with as few heads (median over"
            f" {len(removed)} sizes and budgets), and at worst {ratios.max():.3f}."
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
    """Return the rows that time whole answers, where the share of removed heads is nearest to one half."""
    whole = speed[speed["what"] == ("both" if (speed["what"] == "both").any() else "decoder")]
    off_half = (whole["model_heads_removed"] / whole["model_heads"] - 0.5).abs()
    return whole[off_half == off_half.min()]


def _where(row: pd.Series) -> str:
    """Return a size in words, with the quartiles of its speed-up and of the whole model timed against its copy."""
    lengths = " → ".join(str(int(row[name])) for name in ("source_length", "target_length"))
    size = f"d_model {int(row['timed_d_model'])}, batch {int(row['batch_size'])}, {lengths} tokens"
    return f"{size} ({_quartiles(row, 'speedup')}; the whole model against itself {_quartiles(row, 'aa_ratio')})"


def judged(tradeoff: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """Return the rows of scorers that are not random, because a single random draw is noise; all rows if no scorer is
    left."""
    own = tradeoff[tradeoff["scorer"].isin(candidates(tables.get("pruning", tradeoff)))]
    return own if len(own) else tradeoff


def _tradeoff(rows: pd.DataFrame, tables: Tables) -> str:
    """Return in words the fastest model that loses at most 0.01 of quality on the choose split. Fastest means the
    largest lower quartile of the speed-up, because the largest of many medians is large by luck."""
    rows = judged(rows, tables)
    dense, quality = rows[rows["heads_removed"] == 0].iloc[0], quality_name(tables)
    good = rows[rows[CHOOSE_QUALITY] >= dense[CHOOSE_QUALITY] - 0.01]
    best = good.loc[good["speedup_q1"].idxmax()]
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


def _quartiles(row: pd.Series, name: str) -> str:
    return f"quartiles {row[f'{name}_q1']:.2f} to {row[f'{name}_q3']:.2f}"


@needs("speed")
def speedup_curves(tables: Tables) -> Plot:
    """Draw speed-up against heads removed: a row each for encoder, decoder, both; a column per width; a line per
    size."""
    speed = tables["speed"]
    rows, columns = _whats(speed), list(speed["timed_d_model"].unique())
    count, xlabel = len(rows) * len(columns), f"heads removed, of {int(speed['model_heads'].max())}"
    figure, grid = plots.panelled(count, len(columns), (2.9, 2.3), (1.2, 1.4), xlabel, sharex=True, sharey=True)
    for i, axes in enumerate(grid):
        what, d_model = rows[i // len(columns)], columns[i % len(columns)]
        panel = speed[(speed["what"] == what) & (speed["timed_d_model"] == d_model)]
        floor = panel["aa_ratio_q1"].min(), panel["aa_ratio_q3"].max()
        axes.axhspan(*floor, color=CONTROL_COLOUR, alpha=0.25, linewidth=0)
        for n, (_, line) in enumerate(panel.groupby(SIZE, sort=False)):
            removed, look = line["model_heads_removed"], plots.line_style(n)
            plots.draw_curve(axes, line, "model_heads_removed", "speedup", QUARTILES, markersize=4, **look)
            axes.plot(removed, line["speedup"] * line["built_ratio"], **BUILT)
            axes.plot(removed, line["flop_ratio"], color=look["color"], linestyle=":", linewidth=1.2)
        axes.set_xticks(sorted(panel["model_heads_removed"].unique()))
        if i < len(columns):
            axes.set_title(f"d_model {d_model}")
        if i % len(columns) == 0:
            axes.set_ylabel(f"{WHAT[what]}\ntimes as fast")
    sizes = speed.loc[speed["what"] == rows[-1], SIZE].drop_duplicates().itertuples()
    handles = [
        *(Line2D([], [], label=_size(s, speed), markersize=4, **plots.line_style(n)) for n, s in enumerate(sizes)),
        Line2D([], [], label="built with as few heads", **BUILT),
        Line2D([], [], color="#555555", linestyle=":", label="if time went by FLOPs"),
        Line2D([], [], color=CONTROL_COLOUR, alpha=0.4, linewidth=7, label="noise: the whole model against itself"),
    ]
    half = at_half(speed)
    removed, heads = int(half["model_heads_removed"].max()), int(half["model_heads"].max())
    gain = f"{half['speedup'].min():.2f} to {half['speedup'].max():.2f} times as fast"
    plots.legend_above(figure, handles, f"With {removed} of {heads} heads removed, whole answers come {gain}")
    caption = (
        "Speed-up when heads are really removed, evenly from all blocks, against the whole model in turn; bars are"
        " quartiles over rounds. A model built with as few heads from the start is the most that removal can reach."
        " Once no cross-attention has a head the encoder need not run."
    )
    return Plot("speedup", caption, figure)


@needs("tradeoff")
def accuracy_milliseconds(tables: Tables) -> Plot:
    """Draw exact match against the speed-up of the trained model, with the Pareto front."""
    tradeoff = judged(tables["tradeoff"], tables)
    best = tradeoff[QUALITY].max()
    tradeoff = tradeoff[tradeoff[QUALITY] >= best - abs(best) / 2]
    batches, names = list(tradeoff["batch_size"].unique()), list(tradeoff["scorer"].unique())
    labels = "times as fast", quality_name(tables)
    figure, grid = plots.panelled(len(batches), 2, (4.4, 3.7), (0.8, 0.7), *labels, sharey=True)
    for axes, batch_size in zip(grid, batches, strict=True):
        models = tradeoff[tradeoff["batch_size"] == batch_size]
        whole = models[models["heads_removed"] == 0].iloc[0]
        axes.axvspan(whole["aa_ratio_q1"], whole["aa_ratio_q3"], color=CONTROL_COLOUR, alpha=0.25, linewidth=0)
        for i, name in enumerate(names):
            points = models[models["scorer"] == name]
            style: Any = plots.line_style(i) | {"label": name, "linestyle": "", "elinewidth": 1, "capsize": 2}
            bars = plots.errors(points, "speedup", QUARTILES)
            axes.errorbar(points["speedup"], points[QUALITY], xerr=bars, markersize=5, **style)
        front = models[models["on_front"]].sort_values("heads_removed").drop_duplicates("removed")
        axes.plot(front["speedup"], front[QUALITY], label="Pareto front, with heads removed", **FRONT)
        for i, (removed, x, y) in enumerate(zip(front["heads_removed"], front["speedup"], front[QUALITY], strict=True)):
            place: Any = {"textcoords": "offset points", "ha": "center", "va": "bottom" if i % 2 else "top"}
            axes.annotate(str(removed), (x, y), (0, 8 if i % 2 else -8), fontweight="bold", **place)
        axes.set_title(f"batch {batch_size}: whole model {whole['latency_ms']:.2f} ms")
        axes.margins(x=0.1, y=0.12)
        axes.tick_params(labelbottom=True)
    plots.legend_above(figure, grid[0])
    caption = (
        f"{quality_name(tables).capitalize()} of the model on the report split against how many times as fast"
        f" {timed_name(tables)} is with heads really removed; models that keep less than half of it are left out. Rings"
        " and line are the Pareto front as the choose split has it; bars are quartiles over rounds. Within the grey"
        " strip there is no difference to be seen."
    )
    return Plot("tradeoff", caption, figure)


@needs("parts")
def time_by_part(tables: Tables) -> Plot:
    """Draw the shares of attention, feed-forward and rest in the time of encoder, decoder, and both, with all heads."""
    parts = tables["parts"]
    whats, sizes = _whats(parts), ["timed_d_model", *SIZE]
    most = max(len(parts.loc[parts["what"] == what, sizes].drop_duplicates()) for what in whats)
    size = (2.9, 0.34 * most)
    figure, grid = plots.panelled(len(whats), len(whats), size, (1.6, 1.2), "share of the time", sharex=True)
    for axes, what in zip(grid, whats, strict=True):
        rows = parts[parts["what"] == what]
        wide = rows.pivot_table(index=sizes, columns="part", values=["share", "part_ms"], sort=False)
        left = np.zeros(len(wide))
        for part, colour in PART_COLOURS.items():
            shares = wide["share"][part].to_numpy()
            bars = axes.barh(range(len(wide)), shares, 0.75, left, color=colour, label=part.replace("_", "-"))
            axes.bar_label(bars, [f"{each:.0%}" if each > 0.13 else "" for each in shares], label_type="center")
            left += shares
        axes.bar_label(bars, [f"{total:.3g} ms" for total in wide["part_ms"].sum(axis=1)], padding=3)
        named = wide.index.to_frame().itertuples(index=False)
        axes.set_yticks(range(len(wide)), [f"d_model {size.timed_d_model}, {_size(size, parts)}" for size in named])
        axes.tick_params(labelleft=axes is grid[0])
        axes.set(title=WHAT[what], xlim=(0, 1.3), xticks=(0, 0.25, 0.5, 0.75, 1))
        axes.invert_yaxis()
        axes.grid(visible=False)
    plots.legend_above(figure, grid[0])
    caption = (
        "Where the time of the whole model goes; attention's part holds its normalisation, projections and cache."
        " If it took no time and the rest stayed as it is, the whole would be 1 / (1 − share) times as fast."
    )
    return Plot("parts", caption, figure)


def _whats(frame: pd.DataFrame) -> list[str]:
    return [what for what in WHAT if (frame["what"] == what).any()]


def _size(size: Any, frame: pd.DataFrame) -> str:
    """Return the batch size in words, with the lengths if they differ in the table."""
    label = f"batch {size.batch_size}"
    if len(frame.loc[frame["target_length"] > 0, SIZE[1:]].drop_duplicates()) > 1:
        label += f", {size.source_length}" + (f" → {size.target_length} tokens" if size.target_length else " tokens")
    return label
