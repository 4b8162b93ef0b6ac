"""What the model answers to one example with fewer and fewer heads, as it is left and after each recovery."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from mhaprune.experiments.examples import show
from mhaprune.heads import HeadId, HeadMask
from mhaprune.studies.study import Trained
from mhaprune.tables import NOTHING, head_names


def answers_table(
    trained: Trained, pruned: pd.DataFrame, models: Mapping[str, Callable[[HeadMask], Any]]
) -> pd.DataFrame:
    """One row per way of `models`, from a mask to the model without these heads, and row of `pruned`: the answer to
    the first example of the report split, decoded greedily, beside the right one."""
    decode, report = trained.task.vocabulary.decode, trained.splits.report
    source, right = decode(report.source[0].tolist()), decode(report.target[0].tolist())
    grid, rows = trained.network.grid, []
    for way, model in models.items():
        for _, row in pruned.sort_values("heads_removed").iterrows():
            mask = HeadMask(grid).without(*(HeadId(*name) for name in head_names(row["removed"])))
            # a recovery leaves the dense model as it is
            left = model(mask) if mask.removed else models[NOTHING](mask)
            shown = show(left, trained.task, source, right)
            said = {"source": shown.source, "answer": shown.answer, "right_answer": shown.right}
            what = {"scorer": row["scorer"], "recovery": way, "heads_total": len(grid)}
            rows.append({**what, "heads_removed": int(row["heads_removed"]), **said})
    return pd.DataFrame(rows)
