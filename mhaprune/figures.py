"""What is drawn of which tables, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import matplotlib

from mhaprune.experiments.ablate.figures import (
    accuracy_curves,
    accuracy_latency,
    agreement,
    head_scores,
    training_curve,
)
from mhaprune.experiments.anatomy.figures import life_of_the_tensors, scaling
from mhaprune.experiments.compare.figures import agreement_matrix, method_curves, quality_cost, regret_map
from mhaprune.experiments.explain.figures import attention_maps, head_profiles
from mhaprune.experiments.prune.figures import (
    accuracy_by_group,
    compare_smallest,
    recovery_curves,
    removal_order,
    survivors,
)
from mhaprune.experiments.speed.figures import accuracy_milliseconds, speedup_curves, time_by_part
from mhaprune.reporting.head_map import gates_from_other_starts, heads_that_matter
from mhaprune.reporting.plots import STYLE, Plot, Tables
from mhaprune.sweep_plots import compare_curves, compare_methods, compare_runs

Figures = tuple[Callable[[Tables], Plot | Iterable[Plot] | None], ...]

RUN: Figures = (
    heads_that_matter,
    accuracy_curves,
    head_scores,
    agreement,
    accuracy_latency,
    training_curve,
)
METHODS: Figures = (
    heads_that_matter,
    method_curves,
    regret_map,
    quality_cost,
    agreement_matrix,
    head_scores,
    training_curve,
)
PRUNE: Figures = (heads_that_matter, recovery_curves, survivors, removal_order, accuracy_by_group, training_curve)
EXPLAIN: Figures = (
    heads_that_matter,
    head_profiles,
    attention_maps,
    agreement,
    gates_from_other_starts,
    training_curve,
    life_of_the_tensors,
    scaling,
)
SPEED: Figures = (speedup_curves, accuracy_milliseconds, time_by_part)
SWEEP: Figures = (compare_methods, compare_curves, compare_smallest, compare_runs)


def draw(tables: Tables) -> Iterator[Plot]:
    """Every figure that these tables of one run can fill."""
    kinds = {"looks": EXPLAIN, "methods": METHODS, "recovery": PRUNE, "speed": SPEED}
    yield from _draw(tables, next((figures for name, figures in kinds.items() if name in tables), RUN))


def draw_comparison(tables: Tables) -> Iterator[Plot]:
    """Every figure that compares the runs in these tables; runs are told apart by the column `label`."""
    yield from _draw(tables, SWEEP)


def _draw(tables: Tables, figures: Figures) -> Iterator[Plot]:
    for figure in figures:
        with matplotlib.rc_context(STYLE):
            drawn = figure(tables)
            plots = [drawn] if isinstance(drawn, Plot) else list(drawn or ())
        yield from plots
