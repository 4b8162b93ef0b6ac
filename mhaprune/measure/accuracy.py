"""Columns that say how often a model is right, how sure it is, and how large it is."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.statistics.intervals import (
    ONE_SIDED,
    mean_interval,
    paired_interval,
    share_interval,
    wilson_interval,
    with_interval,
)
from mhaprune.subject import Outcome, Subject
from mhaprune.tables import (
    CHOOSE_DROP,
    CHOOSE_EXAMPLES,
    CHOOSE_KIND,
    CHOOSE_MOST,
    CONFIDENCE,
    DENSE_QUALITY,
    ECE,
    ENDS,
    KIND,
    QUALITY,
)

BINS = 15
"""The number of bins of the calibration error."""


def by_group(outcome: Outcome, groups: Sequence[str], dense: Outcome | None = None) -> pd.DataFrame:
    """Return the quality in each group of examples, with its 95 % interval, and, beside the outcome of the dense model,
    how much lower it is. Group 9 comes before group 10. Of one example there is no interval."""
    rows = []
    for group in sorted(set(groups), key=_natural):
        own = torch.tensor([each == group for each in groups], device=outcome.quality.device)
        values: np.ndarray = outcome.quality[own].double().cpu().numpy()
        interval = interval_for(QUALITY, values) if len(values) > 1 else _unknown
        columns = with_interval(QUALITY, values, interval)
        columns |= {} if dense is None else drop_columns("drop", outcome.quality[own], dense.quality[own])
        rows.append({"group": group, "examples": len(values), **columns})
    return pd.DataFrame(rows)


def _unknown(values_E: np.ndarray) -> tuple[float, float]:
    return math.nan, math.nan


def _natural(group: str) -> tuple[int, str]:
    """Return a sort key for names with numbers, so that `10 symbols` comes after `9 symbols`."""
    number = next(filter(str.isdigit, group.split()), "0")
    return int(number), group


def accuracy_columns(outcome: Outcome) -> dict[str, float]:
    """Return the mean of each field of an outcome, with its 95 % interval over examples as `_low` and `_high`."""
    columns: dict[str, float] = {}
    for name, values in outcome._asdict().items():
        values_E = values.double().cpu().numpy()
        columns |= with_interval(name, values_E, interval_for(name, values_E))
    return columns


def calibration_columns(subject: Subject, examples: Data, outcome: Outcome) -> dict[str, float]:
    """Return the mean confidence of a model in its answers, and its `calibration_error`, given the outcome of these
    examples. No columns for a model without a confidence."""
    if (found := subject.confidence(examples, outcome)) is None:
        return {}
    confidence_E = found.double().cpu().numpy()
    error = calibration_error(confidence_E, outcome.quality.double().cpu().numpy())
    return {CONFIDENCE: float(confidence_E.mean()), ECE: error}


def calibration_error(confidence_E: np.ndarray, right_E: np.ndarray) -> float:
    """Return the expected calibration error of Guo et al. (2017): the difference between the share of right answers and
    the mean confidence, in 15 bins of equal width, averaged over examples.

    It is biased upwards: of a perfectly calibrated model it is above 0, because a bin holds few examples.

    >>> round(calibration_error(np.array([0.9, 0.9, 1.0, 1.0]), np.array([1, 1, 0, 0])), 3)
    0.55
    """
    bins_E = np.minimum(confidence_E * BINS, BINS - 1).astype(int)
    return float(np.abs(np.bincount(bins_E, right_E - confidence_E)).sum() / len(right_E))


def interval_for(name: str, values_E: np.ndarray) -> Callable[[np.ndarray], tuple[float, float]]:
    """Return the function that computes the 95 % interval of the mean of a column: `wilson_interval` for a quality or
    loss of only 0 and 1, `share_interval` for other shares from 0 to 1 (never for a loss), else `mean_interval`."""
    if name in (QUALITY, "loss") and yes_or_no(values_E):
        return wilson_interval
    return share_interval if name != "loss" and values_E.min() >= 0 and values_E.max() <= 1 else mean_interval


def size_columns(subject: Subject, report: Data) -> dict[str, int]:
    """Return the number of parameters, and the floating-point operations for one example."""
    batch = report.few()
    return {"parameters": subject.count_parameters(), "flops": subject.count_flops(batch) // len(batch)}


def by_kind(outcome: Outcome, examples: Data) -> dict[str, Outcome]:
    """Return the outcome on each kind of examples, by its name; all of it, without a name, if none are told apart."""
    kinds = examples.by_kind() or {"": torch.arange(len(outcome.quality))}
    made: Any = type(outcome)
    return {kind: made(*(values[rows.to(values.device)] for values in outcome)) for kind, rows in kinds.items()}


def largest_drop(outcome: Outcome, dense: Outcome, examples: Data) -> float:
    """Return by how much the mean quality is below the dense model's, on the kind of examples that loses most."""
    pairs = zip(by_kind(outcome, examples).values(), by_kind(dense, examples).values(), strict=True)
    return max(float((whole.quality.double() - own.quality.double()).mean()) for own, whole in pairs)


def worst_columns(outcome: Outcome, dense: Outcome, examples: Data) -> dict[str, Any]:
    """Return `accuracy_columns` on the kind of examples on which the quality drops most below the dense model's, and
    the name of this kind with the dense model's quality on it; where it drops on none, on the kind of the lowest
    quality. Without kinds, on all."""
    parts, of_dense = by_kind(outcome, examples), by_kind(dense, examples)

    def rank(kind: str) -> tuple[float, float]:
        quality = float(parts[kind].quality.double().mean())
        return quality - float(of_dense[kind].quality.double().mean()), quality

    worst = min(parts, key=rank)
    whole = {KIND: worst, DENSE_QUALITY: float(of_dense[worst].quality.double().mean())} if worst else {}
    return whole | accuracy_columns(parts[worst])


def choose_columns(outcome: Outcome, dense: Outcome, examples: Data) -> dict[str, Any]:
    """Return the columns that choices between models use, from outcomes on the choose split. They are never reported as
    results.

    `choose_drop` is the dense model's quality minus this model's, with its paired 95 % interval. `choose_drop_most` is
    the one-sided end: the drop is at most this, at 95 % confidence. With several kinds of examples, the columns are
    those of the kind with the largest `choose_drop_most`. If that is within a limit, so are the others, at 95 %
    confidence for all together (Berger 1982: each of the tests is at 95 %).
    """
    parts, of_dense = by_kind(outcome, examples), by_kind(dense, examples)
    rows = [({CHOOSE_KIND: kind} if kind else {}) | _choose_columns(parts[kind], of_dense[kind]) for kind in parts]
    return max(rows, key=lambda row: math.inf if math.isnan(row[CHOOSE_MOST]) else row[CHOOSE_MOST])


def _choose_columns(outcome: Outcome, dense: Outcome) -> dict[str, float]:
    means = {f"choose_{name}": float(values.mean()) for name, values in outcome._asdict().items()}
    _, _, most = _drop(outcome.quality, dense.quality, ONE_SIDED)
    return (
        means
        | drop_columns(CHOOSE_DROP, outcome.quality, dense.quality)
        | {CHOOSE_MOST: most, CHOOSE_EXAMPLES: len(dense.quality)}
    )


def drop_columns(name: str, quality_E: Tensor, dense_E: Tensor) -> dict[str, float]:
    """Return the dense model's quality minus this model's on the same examples, with its paired 95 % interval."""
    return {f"{name}{end}": value for end, value in zip(ENDS, _drop(quality_E, dense_E), strict=True)}


def _drop(of_left_E: Tensor, of_dense_E: Tensor, *confidence: float) -> tuple[float, float, float]:
    """Return the drop in quality and both ends of its paired interval."""
    dense_E, left_E = (each.double().cpu().numpy() for each in (of_dense_E, of_left_E))
    binary = yes_or_no(dense_E) and yes_or_no(left_E)
    if len(left_E) < 2:
        return float((dense_E - left_E).mean()), *_unknown(left_E)
    ends = paired_interval(dense_E, left_E, *confidence) if binary else mean_interval(dense_E - left_E, *confidence)
    return float((dense_E - left_E).mean()), *ends


def yes_or_no(values_E: np.ndarray) -> bool:
    """Return True if all values are 0 or 1."""
    return bool(((values_E == 0) | (values_E == 1)).all())
