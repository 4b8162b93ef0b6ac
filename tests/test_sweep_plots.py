from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from mhaprune.figures import draw_comparison
from test_method_plots import EVERY, check_legible, method_tables
from test_plots import pruning_table, text_of

from mhaprune.reporting.plots import Plot
from mhaprune.statistics import student_interval
from mhaprune.tables import Tables


def comparison_tables() -> Tables:
    labels = ("num_heads=2", "num_heads=4")
    pruning = pd.concat([pruning_table(i).assign(label=label) for i, label in enumerate(labels)])
    summary = pd.DataFrame(
        {
            "label": label,
            "scorer": scorer,
            "tolerance": 0.01,
            "heads_total": 4,
            "heads_removed": 2,
            "speedup": 1.3,
            "spearman_with_ablation": rho,
        }
        for label in labels
        for scorer, rho in (("gate", 0.5), ("ablation", float("nan")))
    )
    return {"pruning": pruning, "summary": summary}


def test_runs_are_compared() -> None:
    plots = drawn(comparison_tables())
    assert list(plots) == ["comparison", "runs"]
    for plot in plots.values():
        assert "num_heads=2" in text_of(plot)
        assert "num_heads=4" in text_of(plot)


def drawn(tables: Tables) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw_comparison(tables)}


def test_a_run_keeps_its_colour_and_its_place_in_the_legend_in_every_panel() -> None:
    """Also where the first panel's scorer was not run everywhere."""
    tables = dict(comparison_tables())
    pruning = tables["pruning"]
    tables["pruning"] = pruning[~((pruning["label"] == "num_heads=2") & (pruning["scorer"] == "gate"))]
    figure = next(plot for plot in draw_comparison(tables) if plot.name == "comparison").figure
    colours = {(line.get_label(), line.get_color()) for axes in figure.axes for line in axes.get_lines()}
    assert len(colours) == 2
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"num_heads=2", "num_heads=4"}


def method_runs(runs: int, scorers: tuple[str, ...] = EVERY) -> dict[str, pd.DataFrame]:
    """What is collected from runs of experiment=compare."""
    tables = [method_tables(scorers, seed=seed) for seed in range(runs)]
    return {
        name: pd.concat([tables[seed][name].assign(label=f"seed={seed}") for seed in range(runs)], ignore_index=True)
        for name in ("methods", "pruning")
    }


@pytest.mark.parametrize(("runs", "scorers"), [(4, EVERY), (2, ("gate", "ablation", "random")), (9, EVERY[:5])])
def test_methods_are_compared_over_runs_on_top_what_chooses_best(runs: int, scorers: tuple[str, ...]) -> None:
    tables = method_runs(runs, scorers)
    plots = drawn(tables)
    assert list(plots) == ["methods", "comparison"]
    for plot in plots.values():
        check_legible(plot)
    axes = plots["methods"].figure.axes[0]
    regrets = 100 * tables["methods"].pivot(index="scorer", columns="label", values="regret_sequence_accuracy")
    chosen = tables["methods"].groupby("scorer")["choose_sequence_accuracy"].mean().sort_values(ascending=False)
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


def test_a_control_far_outside_is_said_in_words_and_one_that_is_not_is_drawn() -> None:
    tables = method_runs(2, ("gate", "random"))
    axes = next(draw_comparison(tables)).figure.axes[0]
    mean = 100 * tables["methods"].query("scorer == 'random'")["regret_sequence_accuracy"].mean()
    assert [text.get_text() for text in axes.texts] == [f"{mean:.1f} →"]
    assert axes.get_xlim()[1] < mean
    tables["methods"]["regret_sequence_accuracy"] = 0.3
    axes = next(draw_comparison(tables)).figure.axes[0]
    assert not axes.texts
    assert axes.get_xlim()[1] > 30


def test_runs_have_a_colour_each_as_long_as_colours_last() -> None:
    few, many = (next(draw_comparison(method_runs(runs, EVERY[:3]))).figure for runs in (6, 7))
    assert [text.get_text() for text in few.legends[0].get_texts()][1:] == [f"seed={seed}" for seed in range(6)]
    assert [text.get_text() for text in many.legends[0].get_texts()][1:] == ["one run"]


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (3, 2), (4, 2), (5, 3), (9, 3), (20, 4)])
def test_curves_of_many_scorers_stand_in_rows_of_four_at_most(count: int, columns: int) -> None:
    figure = drawn(method_runs(2, EVERY[:count]))["comparison"].figure
    assert [axes.get_title() for axes in figure.axes] == list(EVERY[:count])
    assert figure.axes[0].get_gridspec().ncols == columns
    assert all(axes.get_xlabel() for axes in figure.axes[-columns:])


def test_the_same_tables_give_the_same_bytes() -> None:
    for tables in (method_runs(2, EVERY[-3:]), comparison_tables()):
        for first, second in zip(draw_comparison(tables), draw_comparison(tables), strict=True):
            assert first.svg == second.svg, first.name
            assert first.png == second.png, first.name
