"""Phrases that the sentences of several experiments share."""

from __future__ import annotations

import pandas as pd

from mhaprune.statistics import student_interval


def points_over_runs(points: pd.Series) -> str:
    """A mean over runs in percentage points, with its 95 % interval: `1.2 points (0.3 to 2.1)`."""
    low, high = student_interval(points)
    return f"{points.mean():.1f} points ({low:.1f} to {high:.1f})"
