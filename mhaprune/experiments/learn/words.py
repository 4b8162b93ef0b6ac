"""Sentences of `experiment=learn`."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from mhaprune.reporting.headline import Number, share_number
from mhaprune.reporting.sentences import say_accuracy
from mhaprune.statistics.intervals import LEAST_RUNS, geometric_mean, student_interval
from mhaprune.tables import SETTING, VALID_QUALITY, Tables

TIMES = ("steps", "seconds")
LAST = f"last_{VALID_QUALITY}"
UNEVEN = 1.25
"""Ratio of the milliseconds of a step between runs of one setting, beyond which their seconds are doubted."""


def say(tables: Tables) -> Iterator[str]:
    """When the target was reached, how sure that is, and how good the model is at the end."""
    row = tables["reached"].iloc[0]
    learning = tables["learning"]
    steps, seconds = learning["step"].iloc[-1], learning["seconds"].iloc[-1]
    target, best, last = row["target"], row[f"best_{VALID_QUALITY}"], row[f"last_{VALID_QUALITY}"]
    if row["reached"]:
        yield (
            f"Exact match on the valid split stays at {target:g} or more from step {row['steps']} on, after"
            f" {plain(row['seconds'])} s of training."
        )
        before = learning[learning["step"] < row["steps"]].iloc[-1]
        yield f"The evaluation before that, at step {before['step']:.0f}, found {before[VALID_QUALITY]:.4g}."
    else:
        yield (
            f"Exact match never stays at {target:g}: it ends at {last:.4g} after {steps} steps, so the time to"
            f" {target:g} is not known."
        )
        yield f"The best evaluation found {best:.4g}."
    yield (
        f"The whole training took {plain(seconds)} s: {steps} steps of {plain(row['ms_per_step'])} ms, for a model of"
        f" {row['parameters']:,} parameters."
    )
    yield say_accuracy(tables["reached"])


def headline(tables: Tables) -> list[Number]:
    """When the target is reached, which a run may never do, and what is reached at the end."""
    row = tables["reached"].iloc[0]
    steps = float(row["steps"]) if row["reached"] else math.nan
    return [Number("steps to the target", steps, least=0.0), share_number("exact match at the end", row[LAST])]


def over_runs(tables: Tables) -> Iterator[str]:
    """Task by task: how many runs of every setting reach the target and when, and what each setting needs beside the
    first one."""
    reached = tables["reached"]
    for task, runs in by_task(reached):
        on = f"On {task}: " if reached["task"].nunique() > 1 else ""
        settings = {str(name): rows for name, rows in runs.groupby(SETTING, sort=False)}
        for name, rows in settings.items():
            yield f"{on}{name}: {_how_many(rows)}"
        first, *others = settings
        for name in others:
            yield f"{on}{_beside(name, settings[name], first, settings[first])}"
    steps = reached.groupby(["task", SETTING], sort=False)["ms_per_step"].agg(["min", "max"])
    worst = steps.loc[(steps["max"] / steps["min"]).idxmax()]
    if worst["max"] > UNEVEN * worst["min"]:
        yield (
            f"A step took from {plain(worst['min'])} to {plain(worst['max'])} ms in runs of one setting, so the machine"
            " was not equally free in all of them: trust the steps more than the seconds."
        )


def by_task(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The runs of each task, with names in the column of settings that do not repeat the task and are never empty. The
    settings have one order in all tasks, that of their first runs."""
    whole = zip(runs[SETTING].str.split(", "), runs["task"], strict=True)
    names = [", ".join(part for part in parts if part != f"task={task}") for parts, task in whole]
    unset = "default" if len(set(names)) > 1 else "all runs"
    named = runs.assign(**{SETTING: [name or unset for name in names]})
    order = {name: i for i, name in enumerate(named[SETTING].unique())}
    for task, rows in named.groupby("task", sort=False):
        yield str(task), rows.sort_values(SETTING, key=lambda own: own.map(order), kind="stable")


def plain(value: float) -> str:
    """Three digits, and all digits before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _how_many(runs: pd.DataFrame) -> str:
    """Say how many runs of a setting reach the target, and when; the mean is not known unless all of them do."""
    there, target = runs[runs["reached"]], runs["target"].iloc[0]
    counted = f"{len(there)} of {len(runs)} runs {'reaches' if len(there) == 1 else 'reach'} {target:g}"
    if len(there) < len(runs):
        given = " and ".join(dict.fromkeys(map(str, sorted(runs.loc[~runs["reached"], "steps"]))))
        rest = f" The rest does not within {given} steps, so the mean is not known." if len(there) else ""
        last = ""
        if len(runs) >= LEAST_RUNS:
            mean, *ends = (min(1.0, max(0.0, share)) for share in (runs[LAST].mean(), *student_interval(runs[LAST])))
            last = f" At the end they are at {mean:.2f} on average ({_to(ends, '{:.2f}'.format)})."
        elif len(runs) > 1:
            last = f" At the end they are at {_and(runs[LAST], '{:.2f}'.format)}."
        return (f"{counted}{_after(there)}.{rest}" if rest else f"{counted} within {given} steps.") + last
    if len(runs) < LEAST_RUNS:
        return f"{counted}{_after(there)}, and {_and(runs.sort_values('steps')['seconds'])} s."
    (steps, *ends), (seconds, *ends_of_seconds) = (geometric_mean(runs[time]) for time in TIMES)
    after = f"{plain(steps)} steps (95 % interval {_to(ends)}) and {plain(seconds)} s ({_to(ends_of_seconds)})"
    return f"{counted}, after {after}, geometric means."


def _after(runs: pd.DataFrame) -> str:
    return f", after {' and '.join(map(str, sorted(runs['steps'])))} steps"


def _beside(name: str, runs: pd.DataFrame, first: str, others: pd.DataFrame) -> str:
    """Compare a setting with the first one, by the seeds with which both reach the target."""
    steps, seconds = (paired_ratios(runs, others, time) for time in TIMES)
    if steps.empty:
        return f"{name} is not compared with {first}: no seed reaches the target with both."
    (more_steps, *ends), (more_seconds, *ends_of_seconds) = geometric_mean(steps), geometric_mean(seconds)
    if len(steps) < LEAST_RUNS:
        return (
            f"{name} needs {_and(steps, _ratio)} times the steps and {_and(seconds, _ratio)} times the seconds of"
            f" {first} (seed{'s' * (len(steps) > 1)} {_and(steps.index, str)} alone, so there is no interval)."
        )
    seeds = f"{len(steps)} seeds"
    if len(steps) < len(all_seeds := set(runs["seed"]) | set(others["seed"])):
        seeds = f"the {len(steps)} of {len(all_seeds)} seeds that reach the target with both"
    return (
        f"{name} needs {_ratio(more_steps)} ({_to(ends, _ratio)}) times the steps and {_ratio(more_seconds)}"
        f" ({_to(ends_of_seconds, _ratio)}) times the seconds of {first} (geometric means and 95 % intervals over"
        f" {seeds})."
    )


def paired_ratios(runs: pd.DataFrame, others: pd.DataFrame, time: str) -> pd.Series:
    """By seed, what the runs need as a multiple of what the others need; only seeds with which all of them reach the
    target."""
    mine, theirs = (_by_seed(rows, time) for rows in (runs, others))
    return (mine / theirs).dropna()


def _by_seed(runs: pd.DataFrame, time: str) -> pd.Series:
    """NaN for a seed with which a run does not reach the target; the geometric mean of runs that were repeated."""
    times = runs[time].where(runs["reached"])
    return np.exp(np.log(times).groupby(runs["seed"]).agg(lambda own: own.mean(skipna=False)))


def _and(values: Iterable[Any], write: Callable[[Any], str] = plain) -> str:
    return " and ".join(map(write, values))


def _to(ends: list[float], write: Callable[[float], str] = plain) -> str:
    low, high = map(write, ends)
    return f"{low} to {high}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if 0.095 <= value < 99.5 else f"{value:.2g}"
