"""What each mistake costs: budget by budget in one run, and over the models of several runs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mhaprune.experiments.mistakes.words import IN_SHORT
from mhaprune.reporting.colours import EXTRA_COST
from mhaprune.reporting.heat_map import heat_map
from mhaprune.reporting.plots import Plot, legend_above, number, panels
from mhaprune.reporting.shared_figures import mean_over_runs
from mhaprune.tables import Tables

COST = "cost in exact match (percentage points)"


def costs_by_budget(tables: Tables) -> Plot | None:
    """A row per mistake, a column per budget, their mean at the right."""
    if "mistake_pruning" not in tables:
        return None
    pruning = tables["mistake_pruning"]
    costs = pruning.pivot_table(index="mistake", columns="heads_removed", values="cost_points", sort=False)
    names: Any = {"rows": costs.index, "columns": [*sorted(costs), "mean"]}
    values = np.column_stack([costs[sorted(costs)], costs.mean(axis=1)])
    largest = max(float(np.abs(values).max()), 1.0)
    figure = Figure(figsize=(max(2.6 + 0.6 * values.shape[1], 6.0), 1.2 + 0.36 * len(values)))
    axes = figure.add_subplot()
    colours: Any = {"cmap": EXTRA_COST, "vmin": -largest, "vmax": largest}
    heat_map(axes, values, **names, write=partial(number, decimals=1), **colours)
    axes.axvline(values.shape[1] - 1.5, color="black", linewidth=1)
    axes.set(xlabel=f"heads removed, of {int(pruning['heads_total'].max())}", title=COST)
    caption = (
        "Exact match on the report split after pruning by the right score minus that after pruning by the mistake, in"
        " percentage points, for every budget and on average. Red: the mistake costs; blue: it gains."
        f" {_explained(costs.index)}"
    )
    return Plot("mistakes", caption, figure)


def compare_costs(tables: Tables) -> Plot | None:
    """The mean cost of every mistake: a panel per task, a row per mistake, a mark per model."""
    if "mistakes" not in tables:
        return None
    mistakes = tables["mistakes"]
    names, tasks = list(mistakes["mistake"].unique()), list(mistakes["task"].unique())
    figure = Figure(figsize=(2.4 + 4.4 * len(tasks), 1.6 + 0.36 * len(names)))
    for axes, task in zip(panels(figure, len(tasks), len(tasks), COST, sharey=True), tasks, strict=True):
        own = mistakes[mistakes["task"] == task]
        own = own.assign(label=[label.replace(f"task={task}, ", "") for label in own["label"]])  # the title says it
        mean_over_runs(axes, own, "mistake", "cost_points", names)
        axes.set_title(task)
    legend_above(figure, figure.axes[0])
    caption = (
        "What each mistake costs in exact match on the report split, on average over the budgets: a small mark per"
        " model, a bar for their mean with its 95 % interval over models, which ends in an arrow where it leaves the"
        f" panel. Right of 0 the right way is better. {_explained(names)}"
    )
    return Plot("mistakes", caption, figure)


def _explained(names: Iterable[str]) -> str:
    """What the mistakes of these names are."""
    return f"The mistakes: {'; '.join(f'{name}: {IN_SHORT[name]}' for name in names)}."
