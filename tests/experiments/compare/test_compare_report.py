"""The figures of `experiment=compare`, of one run and of several, from made-up tables of all sizes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mhaprune.lab.experiments.compare import compare_report as report
from mhaprune.lab.experiments.compare.compare import Compare
from mhaprune.lab.reporting.plots import Plot, draw
from mhaprune.statistics.intervals import student_interval
from mhaprune.tables import Tables
from support.figures import check_legible
from support.sizes import slow

BY_FAMILY = {
    "gate": "gate gate_output",
    "ablation": "ablation ablation_mean ablation_resample",
    "gradient": "taylor taylor_example taylor_batch fisher other_gradient",
    "game": "a_game",
    "weights": "magnitude",
    "attention": "confidence entropy",
    "trained": "hard_concrete subset raced",
    "control": "random",
}
FAMILIES = {name: family for family, names in BY_FAMILY.items() for name in names.split()}
EVERY = tuple(FAMILIES)
CASES = {
    "all": (EVERY, 24),
    "three": (("gate", "ablation", "random"), 24),
    "small": ((*EVERY[:9], "random"), 6),
    "three small": (("gate", "taylor", "ablation"), 6),
    "one": (("ablation",), 6),
}


def method_tables(scorers: tuple[str, ...] = EVERY, heads: int = 24, seed: int = 0) -> dict[str, pd.DataFrame]:
    """What experiment=compare writes: `scorers` × budgets on `heads` heads in blocks of `heads // 6`."""
    chance = np.random.default_rng(seed)
    budgets = sorted({round(heads * share / 8) for share in range(9)})
    best = {n: 1 / (1 + np.exp(14 * (n / heads - 0.72))) for n in budgets}
    pruning = _pruning(scorers, heads, best, chance)
    training = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0], "valid_loss": [2.1, 1.2]})
    return {
        "methods": _methods(pruning, scorers, heads),
        "pruning": pruning,
        "training": training.assign(valid_quality=[0.1, 0.9]),
    }


def _pruning(scorers: tuple[str, ...], heads: int, best: dict[int, Any], chance: np.random.Generator) -> pd.DataFrame:
    skill = {name: 1.0 if name == "random" else chance.uniform(0.02, 0.5) ** 1.5 for name in scorers}
    rows = []
    for name in scorers:
        for number in range(10 if name == "random" else 1):
            worse = skill[name] * chance.uniform(0.7, 1.3)
            for n in best:
                own = 1 / (1 + np.exp(14 * (n / heads - 0.72 + 0.55 * worse)))
                own = own if 0 < n < heads else best[n]
                rows.append(
                    {"scorer": name, "family": FAMILIES[name], "settings": "", "draw": number, "schedule": "one_shot"}
                    | {"heads_total": heads, "heads_kept": heads - n, "heads_removed": n, "fraction_removed": n / heads}
                    | {f"quality{end}": own + by for end, by in (("", 0), ("_low", -0.02), ("_high", 0.02))}
                    | {"regret_quality": best[n] - own + (chance.normal(0, 0.004) if 0 < n < heads else 0)}
                )
    table = pd.DataFrame(rows)
    table["regret_quality_low"] = table["regret_quality"] - 0.02
    table["regret_quality_high"] = table["regret_quality"] + 0.02
    return table


def _methods(pruning: pd.DataFrame, scorers: tuple[str, ...], heads: int) -> pd.DataFrame:
    rows = []
    for name in scorers:
        regret = pruning.loc[pruning["scorer"] == name, "regret_quality"].mean()
        rows.append(
            {"scorer": name, "family": FAMILIES[name], "settings": ""}
            | {"choose_quality": 0.7 - regret, "choose_loss": regret}
            | {"regret_quality": regret}
            | {"regret_quality_low": regret - 0.012, "regret_quality_high": regret + 0.012}
            | {"forward_passes": heads, "backward_passes": int(FAMILIES[name] == "gradient"), "seconds": 1.0}
        )
    return pd.DataFrame(rows)


def drawn(tables: Tables) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw(Compare.figures, tables)}


@pytest.mark.parametrize("case", ["all", *slow(*(case for case in CASES if case != "all"))])
def test_no_word_of_a_figure_is_clipped_or_covered(case: str) -> None:
    for plot in drawn(method_tables(*CASES[case])).values():
        check_legible(plot)
        assert plot.caption.endswith(".")


def test_the_regret_map_is_in_the_order_of_mean_regret_and_shows_the_table() -> None:
    tables = method_tables()
    left, right = drawn(tables)["regret"].figure.axes
    rows = [label.get_text() for label in left.get_yticklabels()]
    columns = [int(label.get_text()) for label in left.get_xticklabels()]
    methods = tables["methods"].set_index("scorer")
    assert rows == list(methods["regret_quality"].sort_values().index)
    assert columns == sorted(tables["pruning"]["heads_removed"].unique())[1:-1]
    shown = {text.get_position(): text.get_text().replace("−", "-") for text in left.texts}
    regrets = 100 * tables["pruning"].groupby(["scorer", "heads_removed"])["regret_quality"].mean()
    fair = [column for column in columns if column < 17]
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            lost = round(regrets[row, column]) if column in fair else 0  # grey: the best set has lost half there
            assert shown.get((j, i), "0") == str(lost), "half a point and less is left white"
    grey = np.isnan(np.ma.filled(left.images[0].get_array(), np.nan)).all(axis=0)
    assert [column for column, is_grey in zip(columns, grey, strict=True) if not is_grey] == fair
    good = sum(regrets[row][fair].mean() < 1 for row in rows)
    assert left.figure.get_suptitle().startswith(f"{good} of {len(rows)} methods")
    points = [container.lines[0].get_xydata()[0] for container in right.containers]
    np.testing.assert_allclose(points, [(100 * methods["regret_quality"][row], i) for i, row in enumerate(rows)])
    reach = [container.lines[2][0].get_segments()[0][:, 0] for container in right.containers]
    np.testing.assert_allclose(reach, 100 * methods.loc[rows, ["regret_quality_low", "regret_quality_high"]])
    assert [x < right.get_xlim()[1] for x, _ in points] == [name != "random" for name in rows]


def test_a_hundredth_of_a_cosine_is_no_percentage_point() -> None:
    tables = {name: table.assign(quality_name="similarity") for name, table in method_tables().items()}
    plot = drawn(tables)["regret"]
    assert [plot.figure.axes[0].get_title(), plot.figure.axes[1].get_xlabel()] == [
        "hundredths of similarity lost",
        "hundredths",
    ]
    assert "point" not in plot.caption + plot.figure.get_suptitle()
    winner = pd.DataFrame(
        [{"first": "a", "tied": "", "better": "", "choice": "a", "most_passes": 30.0, "oracle": "exact"}]
    )
    winner = winner.assign(forward_passes=1, backward_passes=0, regret_quality=0.004)
    winner = winner.assign(regret_quality_low=0.001, regret_quality_high=0.009, quality_name="similarity", task="sort")
    said = " ".join(report.say({"methods": tables["methods"], "winner": winner}))
    assert "its heads lose 0.4 hundredths of similarity" in said
    runs = [tables["methods"].assign(task="sort", label=f"sort {seed}") for seed in range(3)]
    over = " ".join(report.say_over_runs({"methods": pd.concat(runs), "winner": winner}))
    assert "hundredths" in over
    assert "point" not in said + over


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
    made = (
        method_tables(scorers, seed=seed)["methods"].assign(label=f"seed={seed}", setting="") for seed in range(runs)
    )
    return {"methods": pd.concat(made, ignore_index=True)}


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
