"""What hard pruning found, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from mhaprune.plots import Tables
from mhaprune.recoveries import NOTHING


def smallest_headline(smallest: pd.DataFrame) -> str:
    """The fewest heads of any way, beside the control of that size."""
    best = _best(smallest)
    total, dense = int(best["heads_total"]), best["dense_sequence_accuracy"]
    if best["heads_removed"] == 0:
        return (
            f"None of {total} heads can go within {best['tolerance']:g} of the dense model's {dense:.3f} exact match,"
            " however they are chosen and whatever is trained afterwards."
        )
    kept = int(best["heads_kept"])
    line = (
        f"{kept} of {total} {'head is' if kept == 1 else 'heads are'} enough for {best['sequence_accuracy']:.3f} exact"
        f" match ({dense:.3f} with all), chosen by {_way(best)}{_trained(best)}"
    )
    if best["control_draws"]:
        line += (
            f"; a model of that shape trained from scratch reaches {best['control_sequence_accuracy']:.3f}"
            f" ({best['control_least']:.3f} to {best['control_most']:.3f}, {int(best['control_draws'])} of them)"
        )
    return (
        f"{line}; greedy decoding is then {best['speedup']:.2f}× as fast"
        f" (quartiles {best['speedup_q1']:.2f}–{best['speedup_q3']:.2f})."
    )


def smallest_details(tables: Tables) -> Iterator[str]:
    """Which heads they are, what each recovery needs, and what went wrong."""
    smallest, noted = tables["smallest"], tables["recovery"].query("note != ''")
    best = _best(smallest)
    if 0 < best["heads_kept"] < best["heads_total"]:
        yield f"They are (site.layer.head, counted from 0): {str(best['kept']).replace(' ', ', ')}."
    parts = []
    for recovery, rows in smallest.groupby("recovery", sort=False):
        row = _best(rows)
        after = "without any training afterwards" if recovery == NOTHING else f"after {recovery}"
        parts.append(f"{int(row['heads_kept'])} {after} (at {row['sequence_accuracy']:.3f}, {_way(row)})")
    yield f"The fewest heads within {best['tolerance']:g} of exact match on the choose split: {', '.join(parts)}."
    for (name, note), rows in noted.groupby(["recovery", "note"], sort=False):
        yield f"{name} failed for {len(rows)} of the models ({note})."


def smallest_over_runs(smallest: pd.DataFrame) -> Iterator[str]:
    """Over the runs of each task: the fewest heads of any way, with each kind of training and without."""
    for task, mine in smallest.groupby("task", sort=False):
        labels = mine["label"].unique()
        if len(labels) < 2:
            continue
        parts = []
        for recovery, rows in mine.groupby("recovery", sort=False):
            fewest = rows.groupby("label", sort=False)["heads_kept"].min()
            after = "without any training afterwards" if recovery == NOTHING else f"after {recovery}"
            parts.append(f"{', '.join(map(str, fewest))} {after}")
        yield f"Of {int(mine['heads_total'].max())} heads {task} needs, run by run: {'; '.join(parts)}."


def _best(smallest: pd.DataFrame) -> Any:
    """The fewest heads; of equals the best on the choose split."""
    order = smallest.sort_values(["heads_kept", "choose_sequence_accuracy"], ascending=[True, False], kind="stable")
    return order.iloc[0]


def _way(row: Any) -> str:
    return str(row["schedule"]) + (f" with {row['scorer']}" if row["scorer"] != row["schedule"] else "")


def _trained(row: Any) -> str:
    return "" if row["recovery"] == NOTHING else f" and trained for {int(row['steps'])} steps more ({row['recovery']})"
