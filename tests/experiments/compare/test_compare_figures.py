from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.text import Text

from made_methods import CASES, EVERY, SMALLER, crowded, drawn, method_tables, one
from support.legible import check_legible
from support.made_tables import text_of
from support.sizes import slow


@pytest.mark.parametrize("case", ["all", *slow("three", "one", *SMALLER)])
def test_no_word_of_a_figure_is_clipped_or_covered(case: str) -> None:
    plots = drawn(method_tables(*CASES[case]))
    assert ("agreement" in plots) == (case != "one"), "one scorer agrees with no other"
    for plot in plots.values():
        check_legible(plot)
        assert plot.caption.endswith(".")
        assert all(axes.get_xlabel() or axes.get_ylabel() for axes in plot.figure.axes[-1:] if plot.name != "training")


@pytest.mark.parametrize("case", ["all", "three", "small"])
def test_every_scorer_has_its_curve_in_one_panel_between_the_best_subset_and_the_control(case: str) -> None:
    tables = method_tables(*CASES[case])
    figure = one(tables, "accuracy").figure
    oracle = tables["oracle"].query("objective == 'quality'")
    control = tables["pruning"].query("scorer == 'random'").groupby("heads_removed")["quality"].mean()
    found = []
    for axes in figure.axes:
        curves = {line.get_label(): line.get_ydata() for line in axes.get_lines() if line.get_label()[0] != "_"}
        np.testing.assert_array_equal(curves.pop("best subset found"), oracle["quality"])
        np.testing.assert_allclose(curves.pop("random (10 draws)"), control)
        assert curves == {}
        legend = axes.get_legend()
        assert legend is not None
        names = [text.get_text() for text in legend.get_texts()]
        assert 1 <= len(names) <= 6
        assert len(axes.containers) == len(names)
        for name, container in zip(names, axes.containers, strict=True):
            own = tables["pruning"].set_index("scorer").loc[name, "quality"]
            np.testing.assert_array_equal(container.lines[0].get_ydata(), own)
        found += names
    assert sorted(found) == sorted(set(tables["methods"]["scorer"]) - {"random"})


def test_families_have_their_panels_and_those_of_one_scorer_share_one() -> None:
    tables = method_tables()
    titles = [axes.get_legend().get_title().get_text() for axes in one(tables, "accuracy").figure.axes]
    assert titles == ["gate", "ablation", "gradient", "attention", "trained", "game, weights"]
    for name in ("methods", "pruning"):
        tables[name]["family"] = tables[name]["family"].where(tables[name]["family"] == "control", "big")
    titles = [axes.get_legend().get_title().get_text() for axes in one(tables, "accuracy").figure.axes]
    assert titles == [f"big ({i} of 4)" for i in (1, 2, 3, 4)]


def test_the_best_subset_is_called_so_only_where_all_were_tried() -> None:
    tables = method_tables(("gate", "random"))
    for kind, label in (("bound", "best subset found"), ("exact", "best subset")):
        tables["oracle"]["kind"] = kind
        for name in ("accuracy", "cost"):
            assert label in [text.get_text() for text in one(tables, name).figure.legends[0].get_texts()]


def cells(axes: Axes) -> np.ndarray:
    shown = np.full(axes.images[0].get_size(), "", dtype=object)
    for text in axes.texts:
        x, y = text.get_position()
        shown[int(y), int(x)] = text.get_text()
    return shown


@pytest.mark.parametrize("case", ["all", "three", "small"])
def test_the_regret_map_is_in_the_order_of_mean_regret_and_shows_the_table(case: str) -> None:
    tables = method_tables(*CASES[case])
    left, right = one(tables, "regret").figure.axes
    rows = [label.get_text() for label in left.get_yticklabels()]
    columns = [int(label.get_text()) for label in left.get_xticklabels()]
    methods = tables["methods"].set_index("scorer")
    assert rows == list(methods["regret_quality"].sort_values().index)
    budgets = sorted(tables["pruning"]["heads_removed"].unique())
    assert columns == budgets[1:-1]
    shown = cells(left)
    regrets = 100 * tables["pruning"].groupby(["scorer", "heads_removed"])["regret_quality"].mean()
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            assert int(shown[i, j].replace("−", "-")) == round(regrets[row, column])
    points = [container.lines[0].get_xydata()[0] for container in right.containers]
    np.testing.assert_allclose(points, [(100 * methods["regret_quality"][row], i) for i, row in enumerate(rows)])
    reach = [container.lines[2][0].get_segments()[0][:, 0] for container in right.containers]
    ends = methods.loc[rows, ["regret_quality_low", "regret_quality_high"]]
    np.testing.assert_allclose(reach, 100 * ends)
    assert left.get_ylim() == right.get_ylim()
    shown_means = [label.get_text() for label in right.get_yticklabels()]
    assert shown_means == [f"{100 * methods['regret_quality'][row]:.1f}".replace("-", "−") for row in rows]
    inside = [right.get_xlim()[0] < x < right.get_xlim()[1] for x, _ in points]
    assert inside == [name != "random" for name in rows]
    assert [text.get_text() for text in right.texts] == ["→"]


def test_the_regret_map_marks_the_choices_of_the_headline() -> None:
    """Also where another scorer turns out better on the report split."""
    tables = method_tables(("gate", "taylor", "ablation", "random"))
    best, second = tables["methods"].sort_values("regret_quality")["scorer"][:2]
    plain = one(tables, "regret")
    for chosen, limits, words in (
        ([best], [np.inf], f"{best} at any cost"),
        ([second], [np.inf], f"{second} at any cost"),
        ([second, best], [np.inf, 30.0], f"{second} at any cost and {best} with at most 30 forward passes"),
    ):
        winner = pd.DataFrame({"choice": chosen, "most_passes": limits})
        plot = one(tables | {"winner": winner}, "regret")
        labels = plot.figure.axes[0].get_yticklabels()
        assert {label.get_text() for label in labels if label.get_fontweight() == "bold"} == {
            f"▸ {name}" for name in chosen
        }
        assert [label.get_text().removeprefix("▸ ") for label in labels] == [
            label.get_text() for label in plain.figure.axes[0].get_yticklabels()
        ]
        assert words in plot.caption
        check_legible(plot)


def test_the_agreement_matrix_is_symmetric_complete_and_on_the_whole_scale() -> None:
    tables = method_tables()
    tables["agreement"].loc[3, "spearman"] = np.nan
    axes = one(tables, "agreement").figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [label.get_text() for label in axes.get_xticklabels()]
    assert set(names) == set(EVERY)
    rhos = np.nan_to_num([values_of(tables, a, b) for a, b in pairwise(names)])
    others = np.nan_to_num([values_of(tables, a, b) for a in names for b in names if a != b])
    assert rhos.mean() > others.mean(), "neighbours are alike"
    image = axes.images[0]
    assert image.get_clim() == (-1, 1)
    values = np.ma.filled(image.get_array(), np.nan)
    np.testing.assert_array_equal(values, values.T)
    np.testing.assert_array_equal(np.diag(values), 1)
    for pair in tables["agreement"].itertuples():
        np.testing.assert_equal(values[names.index(pair.scorer), names.index(pair.other)], pair.spearman)
    assert not axes.texts, "numbers do not fit"


def values_of(tables: dict[str, pd.DataFrame], first: str, second: str) -> float:
    pairs = tables["agreement"].set_index(["scorer", "other"])["spearman"]
    return float(pairs[first, second] if (first, second) in pairs else pairs[second, first])


def test_pairs_with_what_is_no_scorer_are_not_in_the_matrix() -> None:
    tables = method_tables(("gate", "ablation", "random"))
    extra = pd.DataFrame([{"scorer": "gate", "other": "gate before training", "spearman": 0.7}])
    tables["agreement"] = pd.concat([tables["agreement"], extra], ignore_index=True)
    assert "gate before training" not in text_of(one(tables, "agreement"))


@pytest.mark.parametrize("tables", [method_tables(heads=6), *map(crowded, range(3))])
def test_names_in_the_cost_figure_overlap_neither_each_other_nor_the_points(tables: dict[str, pd.DataFrame]) -> None:
    plot = one(tables, "cost")
    check_legible(plot)
    axes = plot.figure.axes[0]
    assert {text.get_text().split(" ")[0] for text in axes.texts} == set(tables["methods"]["scorer"])
    points = np.vstack([container.lines[0].get_xydata() for container in axes.containers])
    for text in axes.texts:
        box = Text.get_window_extent(text)
        assert axes.bbox.fully_containsx(box.x0), text.get_text()
        assert axes.bbox.fully_containsx(box.x1), text.get_text()
        for point in axes.transData.transform(points):
            assert not box.padded(4).contains(*point), text.get_text()


def test_cost_counts_a_backward_pass_twice_and_what_is_free_stands_apart() -> None:
    tables = method_tables()
    axes = one(tables, "cost").figure.axes[0]
    assert "a backward counts two" in axes.get_xlabel()
    shown = {text.get_text(): text.xy for text in axes.texts}
    for row in tables["methods"].query("scorer != 'random'").itertuples():
        x, y = shown[row.scorer]
        assert y == pytest.approx(100 * row.regret_quality)
        cost = row.forward_passes + 2 * row.backward_passes
        assert x == pytest.approx(cost) if cost else x < 0.5
    ticks = dict(zip(axes.get_xticks(), [label.get_text() for label in axes.get_xticklabels()], strict=True))
    assert ticks[shown["gate"][0]] == "0"
    assert ticks[1000.0] == "1,000"
    nothing_free = one(method_tables(("ablation", "taylor")), "cost").figure.axes[0]
    assert "0" not in [label.get_text() for label in nothing_free.get_xticklabels()]


def test_a_control_far_above_the_others_is_named_at_the_top_instead_of_crowding_them() -> None:
    tables = method_tables(("gate", "ablation", "random"))
    methods = tables["methods"].set_index("scorer")
    regret, reach = methods.loc["random", "regret_quality"], methods["regret_quality_high"]
    axes = one(tables, "cost").figure.axes[0]
    assert f"random (↑ {100 * regret:.1f})" in [text.get_text() for text in axes.texts]
    assert axes.get_ylim()[1] < 150 * reach[["gate", "ablation"]].max()
    methods.loc["gate", "regret_quality_high"] = regret
    axes = one(tables | {"methods": methods.reset_index()}, "cost").figure.axes[0]
    assert {text.get_text(): text.xy[1] for text in axes.texts}["random"] == pytest.approx(100 * regret)
