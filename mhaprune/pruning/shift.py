"""Measurements of pruned models on examples of another kind than those that heads were scored and chosen on."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from mhaprune.data import Data, Splits
from mhaprune.heads import HeadMask
from mhaprune.measure.columns import accuracy_columns, calibration_columns, drop_columns
from mhaprune.measure.outcomes import measure
from mhaprune.subject import Subject
from mhaprune.tables import DENSE, NOTHING, QUALITY, USUAL


def shift_table(
    subject: Subject,
    splits: Splits[Data],
    models: Iterable[tuple[Mapping[Any, Any], Subject]],
    calibrated: bool = True,
) -> dict[str, pd.DataFrame]:
    """Return the table `shift`, by its name: one row per model and kind of examples, with the quality, and how much
    lower it is than that of the dense model on the same examples. No table without shifts.

    Each model comes with the columns that identify it. The first rows are those of the dense model. If `calibrated`,
    the model's confidence in its answers is measured too: it writes them again.
    """
    kinds = {USUAL: splits.report, **splits.shifts}
    if len(kinds) == 1:
        return {}
    whole = subject.without(HeadMask(subject.grid))
    dense = {kind: measure(whole, examples) for kind, examples in kinds.items()}
    rows = []
    for about, model in ({"scorer": DENSE, "recovery": NOTHING, "heads_removed": 0}, whole), *models:
        for kind, outcome in dense.items():
            own = outcome if model is whole else measure(model, kinds[kind])
            columns = {name: value for name, value in accuracy_columns(own).items() if name.startswith(QUALITY)}
            drop = drop_columns("drop", own, outcome)
            columns |= drop | (calibration_columns(model, kinds[kind], own) if calibrated else {})
            rows.append({**about, "examples_of": kind, "examples": len(own.quality), **columns})
    return {"shift": pd.DataFrame(rows)}
