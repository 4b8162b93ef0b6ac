"""The report of `experiment=learn`: when a run reaches its target, and the steps and seconds of many runs."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mhaprune.reporting.headline import Number, share_number
from mhaprune.reporting.plots import COLOURS, Plot, legend_above, needs, panels, scale_in_ratios
from mhaprune.reporting.sentences import say_accuracy
from mhaprune.statistics.intervals import LEAST_RUNS, geometric_mean
from mhaprune.tables import SETTING, VALID_QUALITY, Tables

TIMES = ("steps", "seconds")
LAST = f"last_{VALID_QUALITY}"
REACHED: Any = {"marker": "o", "markersize": 5, "linestyle": "", "color": COLOURS[0], "label": "a run"}
CENSORED: Any = REACHED | {"color": COLOURS[1], "markerfacecolor": "white", "label": "a run that does not get there"}
MEAN: Any = {"marker": "|", "markersize": 13, "markeredgewidth": 2.5, "linestyle": "", "color": "black"}
WIDEST = 38
"""Largest number of letters of a setting in one line."""


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences: when the target was reached, how long training took, and how good the model is at the end."""
    row, training = tables["reached"].iloc[0], tables["training"]
    target, seconds = f"{row['target']:g}", training["seconds"].iloc[-1]
    if row["reached"]:
        before = training[training["step"] < row["steps"]].iloc[-1]
        yield (
            f"Exact match on the valid split stays at {target} or more from step {row['steps']} on, after"
            f" {plain(row['seconds'])} s of training; at step {before['step']:.0f} it was {before[VALID_QUALITY]:.4g}."
        )
    else:
        yield (
            f"Exact match never stays at {target}: it ends at {row[LAST]:.4g} after {row['steps']} steps, and the best"
            f" evaluation found {row[f'best_{VALID_QUALITY}']:.4g}. So the time to {target} is not known."
        )
    yield (
        f"The whole training took {plain(seconds)} s: {training['step'].iloc[-1]} steps of"
        f" {plain(row['ms_per_step'])} ms, for a model of {row['parameters']:,} parameters."
    )
    yield say_accuracy(tables["reached"])


def headline(tables: Tables) -> list[Number]:
    """Return two numbers: the steps to the target, NaN if it is not reached, and the quality at the end."""
    row = tables["reached"].iloc[0]
    steps = float(row["steps"]) if row["reached"] else math.nan
    end = share_number("exact match at the end", row[LAST], beside="on the valid split")
    return [Number("steps to the target", steps, least=0.0), end]


def over_runs(tables: Tables) -> Iterator[str]:
    """Yield sentences for each task: how many runs of every setting reach the target and when, and how each other
    setting compares with the first setting."""
    reached = tables["reached"]
    for task, runs in by_task(reached):
        on = f"On {task}: " if reached["task"].nunique() > 1 else ""
        settings = {str(name): rows for name, rows in runs.groupby(SETTING, sort=False)}
        for name, rows in settings.items():
            yield f"{on}{name}: {_how_many(rows)}"
        first, *others = settings
        for name in others:
            yield f"{on}{_compared_with_first(name, settings[name], first, settings[first])}"
    yield "Means are geometric, with 95 % intervals over runs; fewer than three runs have neither."


def by_task(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the runs of each task. Names of settings lose `task=...`; an empty name is `default`."""
    for task, rows in runs.groupby("task", sort=False):
        parts = ([part for part in name.split(", ") if part != f"task={task}"] for name in rows[SETTING])
        yield str(task), rows.assign(**{SETTING: [", ".join(own) or "default" for own in parts]})


def plain(value: float) -> str:
    """Return a number as text with three digits, 1.23 or 12.3; from 1000 with all digits before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _how_many(runs: pd.DataFrame) -> str:
    """Return how many runs of a setting reach the target, and when, in words; the mean only if all of them do."""
    there, others = runs[runs["reached"]], runs[~runs["reached"]]
    counted = f"{len(there)} of {len(runs)} runs {'reaches' if len(there) == 1 else 'reach'} {runs['target'].iloc[0]:g}"
    if others.empty:
        return f"{counted}, after {_mean(there['steps'])} steps and {_mean(there['seconds'])} s."
    counted += f", after {_listed(there['steps'])} steps" if len(there) else ""
    end = f"{others[LAST].mean():.2f}{' on average' if len(others) > 1 else ''}"
    who = "the others are" if len(there) else "they are"
    return f"{counted}; after {_listed(others['steps'].unique())} steps {who} at {end}."


def _compared_with_first(name: str, runs: pd.DataFrame, first: str, others: pd.DataFrame) -> str:
    """Return in words a comparison of two settings, over the seeds with which the runs of both reach the target."""
    steps, seconds = (paired_ratios(runs, others, time) for time in TIMES)
    if steps.empty:
        return f"{name} is not compared with {first}: no seed reaches the target with both."
    seeds = set(runs["seed"]) | set(others["seed"])
    return (
        f"{name} needs {_mean(steps)} times the steps and {_mean(seconds)} times the seconds of {first}"
        f" (by seed; {len(steps)} of {len(seeds)} reach the target with both)."
    )


def paired_ratios(runs: pd.DataFrame, others: pd.DataFrame, time: str) -> pd.Series:
    """Return, for each seed, the `time` ("steps" or "seconds") of `runs` divided by the `time` of `others`. A seed with
    a run that misses the target is left out. If several runs have one seed, their geometric mean is taken."""
    logarithms = (np.log(rows[time].where(rows["reached"])).groupby(rows["seed"]) for rows in (runs, others))
    mine, theirs = (own.agg(lambda times: times.mean(skipna=False)) for own in logarithms)
    return np.exp(mine - theirs).dropna()


def _mean(values: pd.Series) -> str:
    """Return the geometric mean with its interval, in words; for fewer than `LEAST_RUNS` values, the values
    themselves."""
    if len(values) < LEAST_RUNS:
        return _listed(values)
    mean, low, high = map(plain, geometric_mean(values))
    return f"{mean} ({low} to {high})"


def _listed(values: Sequence[Any] | pd.Series) -> str:
    return " and ".join(map(plain, sorted(values)))


@needs("reached")
def time_to_accuracy(tables: Tables) -> Plot:
    """Draw the steps and seconds to the target: a block per task, a row per setting, a circle per run."""
    blocks = [(task, runs, list(runs[SETTING].unique())) for task, runs in by_task(tables["reached"])]
    names = [[textwrap.fill(name, WIDEST, break_on_hyphens=False) for name in own] for _, _, own in blocks]
    heights = [0.3 + sum(0.34 + 0.15 * name.count("\n") for name in own) for own in names]
    letters = max(len(line) for own in names for name in own for line in name.splitlines())
    figure = Figure(figsize=(7.3 + 0.08 * letters, 1.1 + sum(0.45 + height for height in heights)))
    grid = panels(figure, 2 * len(blocks), 2, "", sharey="row", height_ratios=heights)
    for i, (task, runs, settings) in enumerate(blocks):
        for axes, time in zip(grid[2 * i : 2 * i + 2], TIMES, strict=True):
            _draw_times(axes, runs, time)
            axes.set(xlabel=f"{time} to the target", title=task if len(blocks) > 1 else "")
            axes.set_yticks(range(len(settings)), names[i])
            axes.set_ylim(len(settings) - 0.5, -0.5)
            axes.tick_params(labelbottom=True)
            axes.tick_params(axis="y", length=0)
    drawn = {line.get_label(): line for axes in grid for line in axes.get_lines()}
    legend_above(figure, list(drawn.values()))
    caption = (
        "Steps and seconds of training until exact match on the valid split reaches the target and stays there, on"
        " logarithmic axes: a circle per run and, where all runs of a setting get there, a bar for their geometric mean"
        " with its 95 % interval. An open circle is the end of a training that does not get there."
    )
    return Plot("time_to_accuracy", caption, figure)


def _draw_times(axes: Axes, runs: pd.DataFrame, time: str) -> None:
    """Draw a row per setting: a circle per run and, if all of them reach the target, their mean with its interval."""
    for row, (_, own) in enumerate(runs.groupby(SETTING, sort=False)):
        places = row + np.linspace(-0.22, 0.22, len(own) + 2)[1:-1]  # equal runs would cover each other
        for x, y, reached in zip(own[time], places, own["reached"], strict=True):
            axes.plot([x], [y], zorder=3, **(REACHED if reached else CENSORED))
        if own["reached"].all() and len(own) > 1:
            mean, low, high = geometric_mean(own[time])
            axes.hlines(row, low, high, color="black", linewidth=1.2)
            axes.plot([mean], [row], label="geometric mean, 95 % interval", **MEAN)
    room = max(runs[time].max() / runs[time].min(), 1.5) ** 0.25
    scale_in_ratios(axes.xaxis, runs[time].min() / room, runs[time].max() * room)
