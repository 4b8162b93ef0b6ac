"""The figures of `experiment=compare`, of one run and of several."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from made_methods import CASES, EVERY, method_tables
from mhaprune.experiments.compare.study import Compare
from mhaprune.reporting.plots import Plot, draw
from mhaprune.statistics.intervals import student_interval
from mhaprune.tables import Tables
from support.legible import check_legible
from support.sizes import slow


def drawn(tables: Tables) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw(Compare.figures, tables)}


@pytest.mark.parametrize("case", ["all", *slow(*(case for case in CASES if case != "all"))])
def test_no_word_of_a_figure_is_clipped_or_covered(case: str) -> None:
    for plot in drawn(method_tables(*CASES[case])).values():
        check_legible(plot)
        assert plot.caption.endswith(".")


def cells(axes: Axes) -> np.ndarray:
    shown = np.full(axes.images[0].get_size(), "", dtype=object)
    for text in axes.texts:
        x, y = text.get_position()
        shown[int(y), int(x)] = text.get_text()
    return shown


@pytest.mark.parametrize("case", ["all", "three", "small"])
def test_the_regret_map_is_in_the_order_of_mean_regret_and_shows_the_table(case: str) -> None:
    tables = method_tables(*CASES[case])
    left, right = drawn(tables)["regret"].figure.axes
    rows = [label.get_text() for label in left.get_yticklabels()]
    columns = [int(label.get_text()) for label in left.get_xticklabels()]
    methods = tables["methods"].set_index("scorer")
    assert rows == list(methods["regret_quality"].sort_values().index)
    assert columns == sorted(tables["pruning"]["heads_removed"].unique())[1:-1]
    shown = cells(left)
    regrets = 100 * tables["pruning"].groupby(["scorer", "heads_removed"])["regret_quality"].mean()
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            assert int(shown[i, j].replace("−", "-")) == round(regrets[row, column])
    points = [container.lines[0].get_xydata()[0] for container in right.containers]
    np.testing.assert_allclose(points, [(100 * methods["regret_quality"][row], i) for i, row in enumerate(rows)])
    reach = [container.lines[2][0].get_segments()[0][:, 0] for container in right.containers]
    np.testing.assert_allclose(reach, 100 * methods.loc[rows, ["regret_quality_low", "regret_quality_high"]])
    costs = methods["forward_passes"] + 2 * methods["backward_passes"]
    assert [label.get_text() for label in right.get_yticklabels()] == [
        f"{100 * methods['regret_quality'][row]:.1f}, {costs[row]} passes".replace("-", "−") for row in rows
    ]
    assert [x < right.get_xlim()[1] for x, _ in points] == [name != "random" for name in rows]


def test_the_regret_map_marks_the_choices_of_the_headline() -> None:
    tables = method_tables(("gate", "taylor", "ablation", "random"))
    chosen = list(tables["methods"].sort_values("regret_quality")["scorer"][1::-1])
    plot = drawn(tables | {"winner": pd.DataFrame({"choice": chosen, "most_passes": [np.inf, 30.0]})})["regret"]
    labels = plot.figure.axes[0].get_yticklabels()
    assert {label.get_text() for label in labels if label.get_fontweight() == "bold"} == set(chosen)
    assert f"{chosen[0]} at any cost and {chosen[1]} with at most 30 forward passes" in plot.caption


def over_runs(tables: Tables) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw(Compare.figures_over_runs, tables)}


def method_runs(runs: int, scorers: tuple[str, ...] = EVERY) -> Mapping[str, pd.DataFrame]:
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
    plots = over_runs(tables)
    for plot in plots.values():
        check_legible(plot)
    axes = plots["methods"].figure.axes[0]
    regrets = 100 * tables["methods"].pivot(index="scorer", columns="label", values="regret_quality")
    chosen = tables["methods"].groupby("scorer")["choose_quality"].mean().sort_values(ascending=False)
    means = regrets.mean(axis=1)[chosen.index]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(means.index)
    dots, marks, bars = axes.collections
    np.testing.assert_allclose(marks.get_offsets(), np.c_[means, range(len(means))])
    for name, ends in zip(means.index, bars.get_segments(), strict=True):
        np.testing.assert_allclose(ends[:, 0], student_interval(regrets.loc[name]))
    drawn = pd.DataFrame(dots.get_offsets(), columns=["regret", "row"]).round({"row": 0})
    for row, name in enumerate(means.index):
        assert sorted(drawn.loc[drawn["row"] == row, "regret"]) == pytest.approx(sorted(regrets.loc[name]))


@pytest.mark.parametrize("settings", [2, *slow(5)])
def test_runs_with_other_settings_have_a_panel_and_a_mean_of_their_own(settings: int) -> None:
    tables = method_runs(2 * settings, ("gate", "ablation", "random"))
    for frame in tables.values():
        heads = frame["label"].str.removeprefix("seed=").astype(int) // 2
        frame["setting"] = [f"num_heads={count}" for count in heads]
    plot = over_runs(tables)["methods"]
    check_legible(plot)
    assert [axes.get_title() for axes in plot.figure.axes] == [f"num_heads={count}" for count in range(settings)]
    for axes, (_, own) in zip(plot.figure.axes, tables["methods"].groupby("setting"), strict=True):
        means = 100 * own.groupby("scorer")["regret_quality"].mean()
        order = [text.get_text() for text in plot.figure.axes[0].get_yticklabels()]
        np.testing.assert_allclose(axes.collections[1].get_offsets()[:, 0], means[order])


def test_a_control_far_outside_is_said_in_words_and_one_that_is_not_is_drawn() -> None:
    tables = method_runs(2, ("gate", "random"))
    axes = over_runs(tables)["methods"].figure.axes[0]
    mean = 100 * tables["methods"].query("scorer == 'random'")["regret_quality"].mean()
    assert [text.get_text() for text in axes.texts] == [f"{mean:.1f} →"]
    assert axes.get_xlim()[1] < mean
    tables["methods"]["regret_quality"] = 0.3
    axes = over_runs(tables)["methods"].figure.axes[0]
    assert not axes.texts
    assert axes.get_xlim()[1] > 30
