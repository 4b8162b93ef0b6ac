from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from legible import check_legible
from made_tables import said_over_runs, text_of
from mhaprune.experiments.mistakes.mistakes import WHAT
from mhaprune.experiments.mistakes.study import Mistakes
from mhaprune.experiments.mistakes.words import IN_SHORT
from mhaprune.reporting.plots import Plot, draw
from mhaprune.statistics.intervals import student_interval
from mhaprune.tables import Tables


def one_run(seed: int = 0, task: str = "sort") -> dict[str, pd.DataFrame]:
    draws = np.random.default_rng(seed)
    rows = [
        {"task": task, "mistake": name, "heads_total": 24, "heads_removed": k, "cost_points": draws.normal(3 * i, 2)}
        for i, name in enumerate(WHAT)
        for k in (3, 6, 9, 12)
    ]
    pruning = pd.DataFrame(rows)
    mistakes = pruning.groupby(["task", "mistake"], sort=False)["cost_points"].mean().reset_index()
    mistakes = mistakes.assign(what=mistakes["mistake"].map(WHAT), spearman=0.9, budgets=4)
    return {"mistakes": mistakes, "mistake_pruning": pruning}


def runs(count: int, *tasks: str) -> Tables:
    frames = [
        one_run(seed, task)["mistakes"].assign(label=f"task={task}, seed={seed}")
        for task in tasks
        for seed in range(count)
    ]
    return {"mistakes": pd.concat(frames, ignore_index=True)}


def plot_over_runs(tables: Tables) -> Plot:
    [plot] = draw(Mistakes.figures_over_runs, tables)
    return plot


def test_one_run_shows_every_cost_and_its_mean() -> None:
    tables = one_run()
    [plot] = draw(Mistakes.figures, tables)
    check_legible(plot)
    axes = plot.figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(WHAT)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["3", "6", "9", "12", "mean"]
    values = np.asarray(axes.images[0].get_array())
    np.testing.assert_allclose(values[:, -1], tables["mistakes"]["cost_points"])
    np.testing.assert_allclose(values[:, :-1].mean(axis=1), tables["mistakes"]["cost_points"])
    assert axes.get_xlabel() == "heads removed, of 24"


@pytest.mark.parametrize(("count", "tasks"), [(5, ("sort",)), (3, ("sort", "reverse")), (7, ("sort",))])
def test_over_runs_a_mark_per_model_and_an_interval_per_mistake(count: int, tasks: tuple[str, ...]) -> None:
    tables = runs(count, *tasks)
    plot = plot_over_runs(tables)
    check_legible(plot)
    assert "cost in exact match (percentage points)" in text_of(plot)
    for axes, task in zip(plot.figure.axes, tasks, strict=True):
        assert axes.get_title() == task
        costs = tables["mistakes"].query("task == @task").pivot(index="mistake", columns="label", values="cost_points")
        means, bars, *marks = axes.collections
        np.testing.assert_allclose(means.get_offsets(), np.c_[costs.loc[list(WHAT)].mean(axis=1), range(len(WHAT))])
        for name, ends in zip(WHAT, bars.get_segments(), strict=True):
            np.testing.assert_allclose(ends[:, 0], student_interval(costs.loc[name]))
        assert len(marks) == count


def test_the_dearest_mistake_is_said_budget_by_budget_and_to_be_of_one_model() -> None:
    tables = one_run()
    tables["mistakes"]["spearman"] = 0.9957
    worst = tables["mistakes"].loc[tables["mistakes"]["cost_points"].idxmax()]
    first, each, costs = Mistakes.say(tables)
    assert first.startswith(f"{worst['mistake']} costs most: {worst['cost_points']:.1f} points")
    assert "4 budgets of this one model" in first
    own = tables["mistake_pruning"].query("mistake == @worst['mistake']")["cost_points"]
    assert ", ".join(f"{cost:.1f}" for cost in own) in each
    assert "ρ = 0.996" in costs
    assert "ρ = 1.00" not in costs


def test_a_mistake_that_a_task_lacks_leaves_its_row_empty() -> None:
    tables = runs(2, "sort", "reverse")
    mistakes = tables["mistakes"]
    rest = mistakes[(mistakes["task"] == "sort") | (mistakes["mistake"] != "random_gate_init")]
    check_legible(plot_over_runs({"mistakes": rest}))


def test_over_runs_what_stands_out_is_said_with_its_interval() -> None:
    tables = runs(3, "sort")
    mistakes = tables["mistakes"]
    for name, costs in (("per_batch", [1, 2, 3]), ("whole_split", [6, 7, 8]), ("not_zeroed", [-6, -7, -8])):
        mistakes.loc[mistakes["mistake"] == name, "cost_points"] = costs
    mistakes.loc[~mistakes["mistake"].isin(["per_batch", "whole_split", "not_zeroed"]), "cost_points"] = 0.0
    lines = list(said_over_runs(Mistakes, tables))
    ends = "of exact match (mean over budgets and models, 95 % interval over models)."
    assert lines[0] == f"Over 3 models on sort whole_split costs 7.0 points (4.5 to 9.5) {ends}"
    assert lines[1] == f"Over 3 models on sort not_zeroed gains 7.0 points (4.5 to 9.5) {ends}"
    assert lines[2].startswith("task=sort, seed=0: whole_split costs most: 6.0 points of exact match")
    mistakes["cost_points"] = 0.0
    lines = list(said_over_runs(Mistakes, tables))
    assert lines[0] == "Over 3 models on sort no mistake costs exact match beyond the noise."
    assert lines[1] == "task=sort, seed=0: None of 6 mistakes costs exact match, mean over 4 budgets of this one model."


def test_one_model_of_a_task_has_no_interval_and_no_sentence_over_runs() -> None:
    assert [line.split(":")[0] for line in said_over_runs(Mistakes, runs(1, "sort", "reverse"))] == [
        "task=sort, seed=0",
        "task=reverse, seed=0",
    ]


def test_every_name_of_a_mistake_is_explained_where_it_stands() -> None:
    """On the terminal and below the figures, in a clause."""
    assert set(IN_SHORT) == set(WHAT)
    tables = one_run()
    *_, costs = Mistakes.say(tables)
    [plot] = draw(Mistakes.figures, tables)
    for name, clause in IN_SHORT.items():
        assert f"{name} ({clause}) " in costs
        for caption in (plot.caption, plot_over_runs(runs(2, "sort")).caption):
            assert f"{name}: {clause}" in caption
