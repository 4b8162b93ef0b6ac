"""What `experiment=speed` found, in sentences."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

WHAT = {
    "encoder": "the encoder",
    "decoder": "greedy decoding with the encoder's output given",
    "both": "greedy decoding, encoder included,",
}


def speed_headline(speed: pd.DataFrame) -> str:
    """What about half of the heads brings where it brings most and where least, beside the floor."""
    rows = _at(speed, 0.5)
    best, least = rows.loc[rows["speedup"].idxmax()], rows.loc[rows["speedup"].idxmin()]
    total, low, high = int(best["heads_total"]), speed["aa_ratio_q1"].min(), speed["aa_ratio_q3"].max()
    line = (
        f"With {int(best['heads_removed'])} of {total} heads removed {WHAT[best['what']].rstrip(',')} is"
        f" {_ratio(best, 'speedup')} times as fast at {_size(best)}"
    )
    if len(rows) > 1:
        line += f", least at {_size(least)}: {_ratio(least, 'speedup')} times"
    return f"{line}. The dense model against itself: quartiles {low:.2f} to {high:.2f} over all sizes."


def speed_details(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Removal against the built limit, the most that heads can bring, and what the trained model can afford."""
    if "speed" not in tables:
        return []
    speed, lines = tables["speed"], []
    removed = speed[(speed["heads_removed"] > 0) & speed["built_ratio"].notna()]
    if len(removed):
        worst = removed.loc[removed["built_ratio"].idxmax()]
        lines.append(
            f"Removal against models built with as few heads: median {removed['built_ratio'].median():.3f} of their time"
            f" over {len(removed)} sizes, at most {_ratio(worst, 'built_ratio', 3)}"
            f" ({WHAT[worst['what']].rstrip(',')}, {_size(worst)}, {int(worst['heads_removed'])} heads removed)."
        )
    for what, rows in tables["parts"][tables["parts"]["part"] == "attention"].groupby("what", sort=False):
        lines.append(
            f"Of the time of {WHAT[str(what)]} attention takes {rows['share'].min():.0%} to {rows['share'].max():.0%}, so"
            f" pruning heads can make it at most {rows['at_most'].min():.1f} to {rows['at_most'].max():.1f} times as fast."
        )
    return lines + [_tradeoff(rows) for _, rows in tables["tradeoff"].groupby("batch_size", sort=False)]


def _tradeoff(rows: pd.DataFrame) -> str:
    """The fastest that costs at most a point on the choose split."""
    dense = rows[rows["heads_removed"] == 0].iloc[0]
    good = rows[rows["choose_sequence_accuracy"] >= dense["choose_sequence_accuracy"] - 0.01]
    best = good.loc[good["latency_ms"].idxmin()]
    return (
        f"The trained model at batch {int(best['batch_size'])}: within 0.01 of exact match on the choose split the fastest"
        f" is {int(best['heads_removed'])} of {int(best['heads_total'])} heads removed by {best['scorer']},"
        f" {best['latency_ms']:.3g} ms instead of {dense['latency_ms']:.3g}, {_ratio(best, 'speedup')} times as fast, at"
        f" {best['sequence_accuracy']:.3f} exact match ({dense['sequence_accuracy']:.3f} with all)."
    )


def _at(speed: pd.DataFrame, share: float) -> pd.DataFrame:
    """The rows with about this share of all heads removed, of what a user waits for."""
    whole = speed[speed["what"] == ("both" if (speed["what"] == "both").any() else "decoder")]
    budgets = whole.loc[whole["budget"] > 0, ["budget", "heads_total"]].drop_duplicates()
    if budgets.empty:
        return whole
    nearest = (budgets["budget"] / budgets["heads_total"] - share).abs().idxmin()
    return whole[whole["budget"] == budgets["budget"][nearest]]


def _ratio(row: pd.Series, name: str, decimals: int = 2) -> str:
    low, high = row[f"{name}_q1"], row[f"{name}_q3"]
    return f"{row[name]:.{decimals}f} (quartiles {low:.{decimals}f} to {high:.{decimals}f})"


def _size(row: pd.Series) -> str:
    size = f"d_model {int(row['timed_d_model'])}, batch {int(row['batch_size'])}"
    lengths = [int(row[name]) for name in ("source_length", "target_length") if row[name]]
    return f"{size}, {' → '.join(map(str, lengths))} tokens"
