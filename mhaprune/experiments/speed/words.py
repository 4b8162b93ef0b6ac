"""Sentences of `experiment=speed`."""

import math
from collections.abc import Iterator

import pandas as pd

from mhaprune.reporting.headline import Number
from mhaprune.reporting.sentences import share
from mhaprune.tables import CHOOSE_QUALITY, QUALITY, Tables, candidates, quality_name

WHAT = {
    "encoder": "the encoder",
    "decoder": "greedy decoding with the encoder's output given",
    "both": "greedy decoding with its encoder pass",
}


def say(tables: Tables) -> Iterator[str]:
    """Say what removal brings at which size, against which limits, and what the trained model can afford."""
    if "sizes" in tables:
        yield _headline(tables["sizes"])
    if "speed" in tables:
        yield from _against_built(tables["speed"])
    for _, rows in tables["tradeoff"].groupby("batch_size", sort=False) if "tradeoff" in tables else ():
        yield _tradeoff(rows, tables)


def headline(tables: Tables) -> list[Number]:
    """The largest speed-up with about half of the heads, of fresh models."""
    rows = _at_half(tables["sizes"]) if "sizes" in tables else pd.DataFrame({"speedup": []})
    return [Number("times as fast with half of the heads", float(rows["speedup"].max()), 1.0, least=0.0)]


def _at_half(sizes: pd.DataFrame) -> pd.DataFrame:
    """The rows with about half of the heads."""
    off_half = (sizes["model_heads_removed"] / sizes["model_heads"] - 0.5).abs()
    return sizes[off_half == off_half.min()]


def _headline(sizes: pd.DataFrame) -> str:
    """The speed-up with about half of the heads, where it is largest and smallest, beside the floor."""
    rows = _at_half(sizes)
    best, least = rows.loc[rows["speedup"].idxmax()], rows.loc[rows["speedup"].idxmin()]
    line = (
        f"With {int(best['model_heads_removed'])} of {int(best['model_heads'])} heads removed {WHAT[best['what']]} is"
        f" {best['speedup']:.2f}× as fast at {_size(best)} ({_quartiles(best, 'speedup')}; the dense model against"
        f" itself {_quartiles(best, 'aa_ratio')})"
    )
    if len(rows) > 1:
        line += (
            f", and least at {_size(least)}: {least['speedup']:.2f}× ({_quartiles(least, 'speedup')}; the dense model"
        )
        line += f" against itself {_quartiles(least, 'aa_ratio')})"
    return f"{line}."


def _against_built(speed: pd.DataFrame) -> Iterator[str]:
    """Compare removal with models that were built with as few heads."""
    removed = speed[speed["heads_removed"] > 0]
    if len(removed):
        worst = removed.loc[removed["built_ratio"].idxmax()]
        yield (
            f"Removal takes {removed['built_ratio'].median():.3f} of the time of models built with as few heads (median"
            f" over {len(removed)} sizes and budgets), and at worst {worst['built_ratio']:.3f}"
            f" ({_quartiles(worst, 'built_ratio', 3)}; the dense model against itself"
            f" {_quartiles(worst, 'aa_ratio', 3)}): {WHAT[worst['what']]} at {_size(worst)},"
            f" {int(worst['heads_removed'])} of its {int(worst['heads_total'])} heads removed."
        )


def judged(tradeoff: pd.DataFrame, tables: Tables) -> pd.DataFrame:
    """The rows of scorers with one order of the heads; all rows if there is no such scorer. A single draw of a control
    is noise."""
    own = tradeoff[tradeoff["scorer"].isin(candidates(tables.get("pruning", tradeoff)))]
    return own if len(own) else tradeoff


def _tradeoff(rows: pd.DataFrame, tables: Tables) -> str:
    """The fastest that costs at most a point on the choose split. It is taken by its lower quartile: the best of many
    medians is the luckiest."""
    rows = judged(rows, tables)
    dense, quality = rows[rows["heads_removed"] == 0].iloc[0], quality_name(tables)
    good = rows[rows[CHOOSE_QUALITY] >= dense[CHOOSE_QUALITY] - 0.01]
    best = good.loc[good["speedup_q1"].idxmax()]
    among = f"Of the trained model at batch {int(best['batch_size'])}, within 0.01 of {quality} on the choose split,"
    if best["heads_removed"] == 0:
        return f"{among} none is surely faster than the whole one: the lower quartile of no speed-up is above 1."
    noise = ""
    if best["speedup_q1"] <= best.get("aa_ratio_q3", math.nan):
        noise = f" That is no clear gain: the whole one against itself has {_quartiles(best, 'aa_ratio')}."
    decimals = max(0, 2 - math.floor(math.log10(best["latency_ms"])))
    times = [f"{row['latency_ms']:.{decimals}f}" for row in (best, dense)]
    return (
        f"{among} the fastest has {int(best['heads_removed'])} of {int(best['heads_total'])} heads removed by"
        f" {best['scorer']}: {times[0]} ms instead of {times[1]},"
        f" {best['speedup']:.2f}× as fast ({_quartiles(best, 'speedup')}), at {share(best[QUALITY])} {quality}"
        f" ({share(dense[QUALITY])} with all).{noise}"
    )


def _quartiles(row: pd.Series, name: str, decimals: int = 2) -> str:
    return f"quartiles {row[f'{name}_q1']:.{decimals}f}–{row[f'{name}_q3']:.{decimals}f}"


def _size(row: pd.Series) -> str:
    size = f"d_model {int(row['timed_d_model'])}, batch {int(row['batch_size'])}"
    lengths = [int(row[name]) for name in ("source_length", "target_length") if row[name]]
    return f"{size}, {' → '.join(map(str, lengths))} tokens"
