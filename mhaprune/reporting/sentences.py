"""Phrases that the sentences of several experiments share."""

from __future__ import annotations

import pandas as pd

from mhaprune.statistics import student_interval
from mhaprune.tables import QUALITY


def points_over_runs(points: pd.Series) -> str:
    """A mean over runs in percentage points, with its 95 % interval: `1.2 points (0.3 to 2.1)`."""
    low, high = student_interval(points)
    return f"{points.mean():.1f} points ({low:.1f} to {high:.1f})"


def say_accuracy(accuracy: pd.DataFrame) -> str:
    """The table `accuracy` in a sentence."""
    row = accuracy.iloc[0]
    return (
        f"{row[QUALITY]:.3f} exact match"
        f" (95 % interval {row['sequence_accuracy_low']:.3f}–{row['sequence_accuracy_high']:.3f}),"
        f" {row['token_accuracy']:.4f} token accuracy on the report split."
    )
