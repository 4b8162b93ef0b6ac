"""The figures of several runs of `experiment=compare`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest

from mhaprune.experiments.compare.study import Compare
from mhaprune.reporting.plots import Plot, draw
from mhaprune.statistics.intervals import student_interval
from mhaprune.tables import Tables
from support.sizes import slow
from test_compare_figures import EVERY, check_legible, method_tables


def over_runs(tables: Tables) -> Iterator[Plot]:
    return draw(Compare.figures_over_runs, tables)


def named(tables: Tables) -> dict[str, Plot]:
    return {plot.name: plot for plot in over_runs(tables)}


def method_runs(runs: int, scorers: tuple[str, ...] = EVERY) -> dict[str, pd.DataFrame]:
    """What is collected from runs of experiment=compare."""
    tables = [method_tables(scorers, seed=seed) for seed in range(runs)]
    return {
        name: pd.concat(
            [tables[seed][name].assign(label=f"seed={seed}", setting="") for seed in range(runs)], ignore_index=True
        )
        for name in ("methods", "pruning")
    }


@pytest.mark.parametrize(("runs", "scorers"), [(4, EVERY), *slow((3, ("gate", "ablation", "random")), (9, EVERY[:5]))])
def test_methods_are_compared_over_runs_on_top_what_chooses_best(runs: int, scorers: tuple[str, ...]) -> None:
    tables = method_runs(runs, scorers)
    plots = named(tables)
    for plot in plots.values():
        check_legible(plot)
    axes = plots["methods"].figure.axes[0]
    regrets = 100 * tables["methods"].pivot(index="scorer", columns="label", values="regret_quality")
    chosen = tables["methods"].groupby("scorer")["choose_quality"].mean().sort_values(ascending=False)
    means = regrets.mean(axis=1)[chosen.index]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(means.index)
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    marks, bars, *dots = axes.collections
    np.testing.assert_allclose(marks.get_offsets(), np.c_[means, range(len(means))])
    for name, ends in zip(means.index, bars.get_segments(), strict=True):
        np.testing.assert_allclose(ends[:, 0], student_interval(regrets.loc[name]))
    assert len(dots) == runs
    for seed, run in enumerate(dots):
        x, y = np.asarray(run.get_offsets()).T
        assert (abs(y - y.round()) < 0.3).all()  # each in the row of its scorer
        np.testing.assert_allclose(x[np.argsort(y)], regrets.loc[means.index, f"seed={seed}"])


@pytest.mark.parametrize("settings", [2, *slow(5)])
def test_runs_with_other_settings_have_a_panel_and_a_mean_of_their_own(settings: int) -> None:
    tables = method_runs(2 * settings, ("gate", "ablation", "random"))
    for frame in tables.values():
        heads = frame["label"].str.removeprefix("seed=").astype(int) // 2
        frame["setting"] = [f"num_heads={count}" for count in heads]
    plot = named(tables)["methods"]
    check_legible(plot)
    assert [axes.get_title() for axes in plot.figure.axes] == [f"num_heads={count}" for count in range(settings)]
    for axes, (_, own) in zip(plot.figure.axes, tables["methods"].groupby("setting"), strict=True):
        means = 100 * own.groupby("scorer")["regret_quality"].mean()
        order = [text.get_text() for text in plot.figure.axes[0].get_yticklabels()]
        np.testing.assert_allclose(axes.collections[0].get_offsets()[:, 0], means[order])
    assert [text.get_text() for text in plot.figure.legends[0].get_texts()][1:] == ["one run"]


def test_a_control_far_outside_is_said_in_words_and_one_that_is_not_is_named() -> None:
    tables = method_runs(2, ("gate", "random"))
    axes = next(over_runs(tables)).figure.axes[0]
    mean = 100 * tables["methods"].query("scorer == 'random'")["regret_quality"].mean()
    assert [text.get_text() for text in axes.texts] == [f"{mean:.1f} →"]
    assert axes.get_xlim()[1] < mean
    tables["methods"]["regret_quality"] = 0.3
    axes = next(over_runs(tables)).figure.axes[0]
    assert not axes.texts
    assert axes.get_xlim()[1] > 30
