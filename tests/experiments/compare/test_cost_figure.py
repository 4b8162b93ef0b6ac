from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from legible import check_legible
from made_methods import FAMILIES, crowded, method_tables, one


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


def test_the_cost_figure_shows_searches_and_the_limit_of_few_passes() -> None:
    """Nine families, each in a style of its own, as in a run with all scorers."""
    tables = method_tables()
    regrets = {"regret_quality": 0.004, "regret_quality_low": 0.0}
    more = [
        {"scorer": name, "family": family, "forward_passes": 300.0, "backward_passes": 0.0, **regrets}
        | {"regret_quality_high": 0.008}
        for name, family in (("greedy", "search"), ("refit_error", "reconstruction"))
    ]
    tables["methods"] = pd.concat([tables["methods"], pd.DataFrame(more)], ignore_index=True)
    plain = one(tables, "cost")
    assert "dotted" not in plain.caption
    assert not [line for line in plain.figure.axes[0].get_lines() if line.get_linestyle() == ":"]
    plot = one(tables | {"winner": pd.DataFrame({"most_passes": [np.inf, 30.0]})}, "cost")
    check_legible(plot)
    axes = plot.figure.axes[0]
    (limit,) = (line for line in axes.get_lines() if line.get_linestyle() == ":")
    assert (list(limit.get_xdata()), limit.get_label()) == ([30, 30], "30 passes")
    assert plot.caption.endswith("The headline compares what stands left of the dotted line with all there is.")
    assert {text.get_text(): text.xy for text in axes.texts}["greedy"] == pytest.approx((300, 0.4))
    styles = {bars.get_label(): (bars.lines[0].get_color(), bars.lines[0].get_marker()) for bars in axes.containers}
    assert set(styles) == {*FAMILIES.values(), "search", "reconstruction"}
    assert len(set(styles.values())) == len(styles)


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


def test_the_cost_figure_tells_the_best_apart() -> None:
    """Half a point is as far as ten points are from thirty."""
    axes = one(crowded(0), "cost").figure.axes[0]
    zero, half, ten, thirty = axes.transData.transform([(1, 0), (1, 0.5), (1, 10), (1, 30)])[:, 1]
    assert half - zero > 0.5 * (thirty - ten)
