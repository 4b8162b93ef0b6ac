"""Figures of `experiment=learn`: the curve of one run, and the curves and times of many."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mhaprune.experiments.learn.words import by_task, plain
from mhaprune.reporting.plots import COLOURS, CONTROL_COLOUR, Plot, legend_above, needs, panels, scale_in_ratios
from mhaprune.reporting.settings import styles_of
from mhaprune.reporting.shared_figures import MOST_LINES
from mhaprune.reporting.whiskers import Whisker, arrows_beyond
from mhaprune.statistics.intervals import geometric_mean
from mhaprune.tables import LABEL, SETTING, VALID_QUALITY, Tables

CLOCKS = (("step", "steps", "steps", "step {}"), ("seconds", "seconds", "seconds of training", "{} s"))
"""The x axes of a figure: the columns of `learning` and of `reached`, the name, and a place on it."""
CIRCLE: Any = {"marker": "o", "markersize": 5, "linestyle": ""}
REACHED: Any = {**CIRCLE, "color": COLOURS[0], "label": "a run"}
CENSORED: Any = {**CIRCLE, "color": COLOURS[1], "markerfacecolor": "white", "label": "a run that does not get there"}
BAR: Any = {"marker": "|", "markersize": 13, "markeredgewidth": 2.5, "linestyle": ""}
MEAN: Any = {**BAR, "color": "black", "label": "geometric mean, 95 % interval"}
TARGET: Any = {"color": CONTROL_COLOUR, "linestyle": "--", "linewidth": 1.2}
WIDEST = 38
"""Letters of a setting in one line."""


@needs("learning", "reached")
def learning_curve(tables: Tables) -> Plot:
    """Exact match on the valid split against steps and seconds, with the place where it reaches the target."""
    learning, row = tables["learning"], tables["reached"].iloc[0]
    figure = Figure(figsize=(9, 3.9))
    grid = panels(figure, 2, 2, "", "exact match (valid split)", sharey=True)
    target = f"target: {row['target']:g}"
    name = "reached, and kept to the end" if row["reached"] else "the end, not reached"
    height = learning.loc[learning["step"] == row["steps"], VALID_QUALITY].iloc[0]
    for axes, (column, time, what, written) in zip(grid, CLOCKS, strict=True):
        axes.plot(learning[column], learning[VALID_QUALITY], color=COLOURS[0], label="exact match", marker=".")
        axes.axhline(row["target"], label=target, **TARGET)
        place, end = row[time], learning[column].iloc[-1]
        axes.axvline(place, color=COLOURS[1], linewidth=0.8, linestyle=":")
        look = (REACHED if row["reached"] else CENSORED) | {"color": COLOURS[1], "markersize": 8, "label": name}
        axes.plot([place], [height], zorder=4, **look)
        words = written.format(plain(place))
        if not row["reached"]:
            _point_right(axes, place, height)
            words = f"not by\n{words}"
        axes.annotate(words, (place, 0.5), (6, 0), textcoords="offset points", va="center", color=COLOURS[1])
        axes.set(xlabel=what, ylim=(-0.03, 1.05), xlim=(-0.02 * end, max(1.03 * end, place + 0.25 * end)))
    legend_above(figure, grid[0])
    caption = "Exact match on the valid split during training, against steps and against seconds of training steps. "
    if row["reached"]:
        caption += "The circle is the first evaluation from which on none is below the target, the dashed line."
    else:
        caption += (
            "It never stays at the target, the dashed line: the open circle is the end of training, and the arrow says"
            " that the target would take longer, if it is reached at all."
        )
    return Plot("learning", caption, figure)


@needs("learning", "reached")
def learning_curves(tables: Tables) -> Plot:
    """Exact match against steps and seconds: a colour per setting, a thin line per run; tasks, and settings beyond the
    colours, in rows of panels of their own."""
    tasks = list(by_task(tables["learning"]))
    every = dict.fromkeys(name for _, runs in tasks for name in runs[SETTING].unique())
    colours = {name: style["color"] for name, style in styles_of(every).items()}  # the same in all tasks
    rows = [(task, runs, names) for task, runs in tasks for names in _parts(colours, runs[SETTING])]
    targets = tables["reached"].groupby("task")["target"].unique()
    written = [[_wrapped(name) for name in names] for _, _, names in rows]
    heights = [max(2.8, 0.8 + 0.17 * sum(1 + name.count("\n") for name in names)) for names in written]
    figure = Figure(figsize=(8.8 + 0.075 * _widest(written), 0.3 + sum(heights)))
    options: Any = {"sharey": True, "height_ratios": heights}
    grid = panels(figure, 2 * len(rows), 2, "", "exact match (valid split)", **options)
    for i, (task, runs, names) in enumerate(rows):
        for axes, (column, _, what, _) in zip(grid[2 * i : 2 * i + 2], CLOCKS, strict=True):
            for name, label in zip(names, written[i], strict=True):
                own, colour = runs[runs[SETTING] == name], colours[name]
                for _, run in own.groupby(LABEL, sort=False):
                    axes.plot(run[column], run[VALID_QUALITY], linewidth=0.7, alpha=0.5, color=colour)
                steps = own.groupby("step")
                mean = steps[column].mean(), steps[VALID_QUALITY].mean()
                axes.plot(*mean, linewidth=1.8, color=colour, label=label)
            for target in targets[task]:
                axes.axhline(target, label=f"target: {target:g}", **TARGET)
            axes.tick_params(labelbottom=True)
            end = runs[column].max()  # the same for all parts of a task
            axes.set(xlabel=what, xlim=(-0.03 * end, 1.03 * end), ylim=(-0.03, 1.05))
            axes.set_title(task if len(targets) > 1 else "")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    caption = (
        "Exact match on the valid split during training, against steps and against seconds of training steps. A colour"
        " per setting: a thin line per run, a thick one for their mean at every step."
    )
    return Plot("learning", caption, figure)


@needs("reached")
def time_to_accuracy(tables: Tables) -> Plot:
    """The steps and seconds to the target: a block per task, a row per setting, a circle per run."""
    reached = tables["reached"]
    blocks = [(task, runs, list(map(_wrapped, runs[SETTING].unique()))) for task, runs in by_task(reached)]
    heights = [0.3 + sum(0.34 + 0.15 * name.count("\n") for name in names) for _, _, names in blocks]
    width = 7.3 + 0.08 * _widest(names for _, _, names in blocks)
    figure = Figure(figsize=(width, 1.1 + sum(0.45 + height for height in heights)))
    grid = panels(figure, 2 * len(blocks), 2, "", sharey="row", height_ratios=heights)
    for i, (task, runs, names) in enumerate(blocks):
        targets = runs["target"].unique()
        target = f"{targets[0]:g} exact match" if len(targets) == 1 else "the target"
        for axes, (_, time, what, _) in zip(grid[2 * i : 2 * i + 2], CLOCKS, strict=True):
            _draw_times(axes, runs, time)
            axes.set(xlabel=f"{what} to {target}", title=task if len(blocks) > 1 else "")
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.tick_params(labelbottom=True)
            axes.tick_params(axis="y", length=0)
        for row, (_, own) in enumerate(runs.groupby(SETTING, sort=False)["reached"]):
            if not own.all():  # beside the right panel
                style: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 9}
                axes.text(1.02, row, f"{own.sum()} of {len(own)}", **style)
    drawn = {line.get_label(): line for axes in grid for line in axes.get_lines()}
    legend_above(figure, [line for label, line in drawn.items() if not str(label).startswith("_")])
    caption = (
        "Steps and seconds of training until exact match on the valid split reaches the target and stays there, on"
        " logarithmic axes: a circle per run and, where all runs of a setting get there, a bar for their geometric mean"
        " with its 95 % interval, which ends in an arrow where it leaves the panel. An open circle with an arrow is the"
        " end of a training that"
        " does not get there, so it would take longer; beside it, how many runs of the setting do."
    )
    return Plot("time_to_accuracy", caption, figure)


def _draw_times(axes: Axes, runs: pd.DataFrame, time: str) -> None:
    """A row per setting: a circle per run and, if all of them reach the target, their mean with its interval."""
    whiskers = []
    for row, (_, own) in enumerate(runs.groupby(SETTING, sort=False)):
        places = row + np.linspace(-0.22, 0.22, len(own) + 2)[1:-1]  # equal runs would hide each other
        for x, y, reached in zip(own[time], places, own["reached"], strict=True):
            axes.plot([x], [y], zorder=3, **(REACHED if reached else CENSORED))
            if not reached:
                _point_right(axes, x, y)
        if own["reached"].all() and len(own) > 1:
            mean, low, high = geometric_mean(own[time])
            axes.hlines(row, low, high, color="black", linewidth=1.2)
            axes.plot([mean], [row], **MEAN)
            whiskers.append(Whisker(row, low, high, "black"))
    _scale(axes, runs[time], [end for each in whiskers for end in each[1:3]])
    arrows_beyond(axes, whiskers, vertical=False)


def _point_right(axes: Axes, x: float, y: float) -> None:
    """An arrow from a circle to the right: the time is longer than that."""
    arrow: Any = {"arrowstyle": "<-", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 4, "color": COLOURS[1]}
    axes.annotate("", (x, y), (20, 0), textcoords="offset points", arrowprops=arrow)


def _scale(axes: Axes, times: pd.Series, ends: Sequence[float]) -> None:
    """Make the x axis logarithmic, with room for all times, for the ends of intervals that are not far off and for an
    arrow at its right, and with a few plain numbers as ticks."""
    low, high = float(times.min()), float(times.max())
    span = max(high / low, 1.5)
    low, high = max(min([low, *ends]), low / span), min(max([high, *ends]), high * span)
    span = max(high / low, 1.5)
    low, high = low / span**0.05, high * span**0.13
    scale_in_ratios(axes.xaxis, low, high)


def _parts(colours: dict[str, str], settings: pd.Series) -> Iterator[list[str]]:
    """A task's settings in their order, in parts in which no colour stands for two of them."""
    names, own, most = list(colours), set(settings), min(len(set(colours.values())), MOST_LINES)
    for start in range(0, len(names), most):
        if part := [name for name in names[start : start + most] if name in own]:
            yield part


def _wrapped(name: str) -> str:
    return textwrap.fill(name, WIDEST, break_on_hyphens=False)


def _widest(names: Iterable[Iterable[str]]) -> int:
    """The letters of the longest line."""
    return max(len(line) for own in names for name in own for line in name.splitlines())
