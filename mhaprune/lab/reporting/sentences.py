"""Phrases that the sentences of several experiments share."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from mhaprune.lab.reporting.names import in_percent, quality_name, timed_name
from mhaprune.lab.reporting.plots import number
from mhaprune.statistics.intervals import student_interval
from mhaprune.tables import DENSE_AGAIN, QUALITY, VALID_QUALITY, Tables

POOR = 0.8
"""A model with a lower quality is called poor."""
POOR_MODEL = "Beware: the model itself is poor"
"""The beginning of a warning about such a model."""


class Aside(str):
    """A sentence for those who read the report. A run does not print it, and the page of several runs folds it."""

    aside = True


def points_of(tables: Tables) -> str:
    """Return the name of a hundredth of the quality: points if it is a share of answers, for a cosine is no
    percentage."""
    return "points" if in_percent(quality_name(tables)) else "hundredths"


def over_runs(values: pd.Series, unit: str) -> str:
    """Return a mean over runs with its 95 % interval: `1.2 points (0.3 to 2.1)`."""
    low, high = student_interval(values)
    return f"{number(values.mean(), 1)} {unit} ({number(low, 1)} to {number(high, 1)})"


def share(value: float) -> str:
    """Return a share in percent, as all sentences write it: 99.2 %."""
    return f"{number(100 * value, 1)} %"


def quality_of(value: float, tables: Tables) -> str:
    """Return a quality in its own unit: a share of answers in percent, others with three decimals."""
    return share(value) if in_percent(quality_name(tables)) and 0 <= value <= 1 else number(value, 3)


def right(value: float, tables: Tables, still: str = "") -> str:
    """Return a quality as a clause: `99.2 % of the answers are right`; another quality by its name. The word `still `
    may stand before the end."""
    name = quality_name(tables)
    return (
        f"{share(value)} of the answers are {still}right"
        if name == "exact match"
        else f"{name} is {still}{quality_of(value, tables)}"
    )


def within_noise(row: Mapping[str, Any] | pd.Series, low: float, high: float) -> bool:
    """Return whether the quartiles of a speed-up meet those of the whole model timed against itself, `low` to
    `high`."""
    return bool(low <= row["speedup_q3"] and row["speedup_q1"] <= high)


def as_fast(row: Mapping[str, Any] | pd.Series, tables: Tables) -> str:
    """Return the speed-up in words: `Greedy decoding of 32 examples is then 1.21 times as fast (quartiles 1.20 to
    1.22).` If the quartiles overlap those of the whole model timed against itself, the sentence says that there is no
    clear gain."""
    latency = tables.get("latency", pd.DataFrame())
    batch = f" of {latency['timed_examples'].iloc[0]} examples" if "timed_examples" in latency else ""
    timed = timed_name(tables)
    once = row["speedup_q1"] == row["speedup_q3"]  # of one round there are no quartiles
    spread = "timed once" if once else f"quartiles {row['speedup_q1']:.2f} to {row['speedup_q3']:.2f}"
    line = f"{timed[0].upper()}{timed[1:]}{batch} is then {row['speedup']:.2f} times as fast ({spread})."
    for again in latency[latency.eq(DENSE_AGAIN).any(axis=1)].to_dict("records"):
        low, high = again["speedup_q1"], again["speedup_q3"]
        if within_noise(row, low, high):
            line += f" That is no clear gain: the whole model against itself is at {low:.2f} to {high:.2f}."
    return line


def if_poor(tables: Tables) -> Iterator[str]:
    """Yield a warning if the model was trained here and is poor at its task: results about its heads are then noise."""
    if VALID_QUALITY in (training := tables.get("training", pd.DataFrame())):
        reached = float(training[VALID_QUALITY].iloc[-1])
        if reached < min(POOR, training.get("learnt", pd.Series([POOR])).iloc[0]):
            yield (
                f"{POOR_MODEL}: at the end of its training {right(reached, tables)}."
                " What is said of its heads means little. Larger training.steps and task.train make it better."
            )


def say_accuracy(accuracy: pd.DataFrame) -> str:
    """Return the table `accuracy` as a sentence."""
    row = accuracy.iloc[0]
    return (
        f"{share(row[QUALITY])} of the answers on the report split are right (95 % interval {share(row['quality_low'])}"
        f" to {share(row['quality_high'])}), and {share(row['token_accuracy'])} of their tokens."
    )
