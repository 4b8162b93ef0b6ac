from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.text import Text

from legible import check_legible
from made_tables import text_of
from mhaprune.experiments.compare import figures
from mhaprune.experiments.compare.cost_figure import quality_cost
from mhaprune.experiments.compare.study import Compare
from mhaprune.reporting.plots import Plot, draw
from tiny import slow

FAMILIES = {
    "gate": "gate",
    "gate_output": "gate",
    "ablation": "ablation",
    "ablation_mean": "ablation",
    "ablation_resample": "ablation",
    "all_but_one": "ablation",
    "taylor": "gradient",
    "taylor_example": "gradient",
    "taylor_batch": "gradient",
    "fisher": "gradient",
    "integrated_gradients": "gradient",
    "shapley": "game",
    "magnitude": "weights",
    "confidence": "attention",
    "entropy": "attention",
    "lrp": "attention",
    "hard_concrete": "trained",
    "subset": "trained",
    "racing": "trained",
    "random": "control",
}
PASSES = {
    "gate": (0, 0),
    "gate_output": (1, 0),
    "magnitude": (0, 0),
    "random": (0, 0),
    "shapley": (1200, 0),
    "hard_concrete": (300, 300),
    "subset": (500, 500),
    "racing": (180, 0),
    "integrated_gradients": (20, 20),
    "confidence": (1, 0),
    "entropy": (1, 0),
    "lrp": (1, 1),
}


EVERY = tuple(FAMILIES)
CASES = {
    "all": (EVERY, 24),
    "three": (("gate", "ablation", "random"), 24),
    "small": ((*EVERY[:9], "random"), 6),
    "three small": (("gate", "taylor", "ablation"), 6),
    "one": (("ablation",), 6),
}
SMALLER = ("small", "three small")
"""Of the first two, with fewer heads."""


def method_tables(scorers: tuple[str, ...] = EVERY, heads: int = 24, seed: int = 0) -> dict[str, pd.DataFrame]:
    """What experiment=compare writes: `scorers` × budgets on `heads` heads in blocks of `heads // 6`."""
    draw = np.random.default_rng(seed)
    budgets = sorted({round(heads * share / 8) for share in range(9)})
    best = {n: 1 / (1 + np.exp(14 * (n / heads - 0.72))) for n in budgets}
    skill = {name: 1.0 if name == "random" else draw.uniform(0.02, 0.5) ** 1.5 for name in scorers}
    pruning = []
    for name in scorers:
        for number in range(10 if name == "random" else 1):
            worse = skill[name] * draw.uniform(0.7, 1.3)
            for n in budgets:
                own = 1 / (1 + np.exp(14 * (n / heads - 0.72 + 0.55 * worse)))
                own = own if 0 < n < heads else best[n]
                pruning.append(
                    {"scorer": name, "family": FAMILIES[name], "settings": "", "draw": number, "schedule": "one_shot"}
                    | {"heads_total": heads, "heads_kept": heads - n, "heads_removed": n, "fraction_removed": n / heads}
                    | {f"quality{end}": own + by for end, by in (("", 0), ("_low", -0.02), ("_high", 0.02))}
                    | {"regret_quality": best[n] - own + (draw.normal(0, 0.004) if 0 < n < heads else 0)}
                )
    table = pd.DataFrame(pruning)
    table["regret_quality_low"] = table["regret_quality"] - 0.02
    table["regret_quality_high"] = table["regret_quality"] + 0.02
    methods = []
    for name in scorers:
        regret = table.loc[table["scorer"] == name, "regret_quality"].mean()
        forward, backward = PASSES.get(name, (1, 1) if FAMILIES[name] == "gradient" else (heads, 0))
        methods.append(
            {"scorer": name, "family": FAMILIES[name], "settings": "", "area": 0.7}
            | {"choose_quality": 0.7 - regret, "choose_loss": regret}
            | {"regret_quality": regret, "spearman_with_ablation": np.nan, "reliability": np.nan}
            | {"regret_quality_low": regret - 0.012, "regret_quality_high": regret + 0.012}
            | {"forward_passes": forward, "backward_passes": backward, "seconds": 1.0}
        )
    oracle = [
        {"objective": objective, "kind": "bound", "heads_total": heads, "heads_removed": n}
        | {"quality": best[n] - shift, "loss": 1 - best[n], "fraction_removed": n / heads}
        for objective, shift in (("loss", 0.07), ("quality", 0.0))
        for n in budgets
    ]
    agreement = [
        {"scorer": a, "other": b, "spearman": np.clip(draw.normal(0.6 if "random" not in (a, b) else 0, 0.3), -1, 1)}
        for i, a in enumerate(scorers)
        for b in scorers[i + 1 :]
    ]
    scores = [
        {"scorer": name, "draw": number, "site": site, "layer": layer, "head": head}
        | {"score": scale * draw.normal(1, 1), "stderr": 0.1 * scale, "skewness": 0.3}
        for name, scale in zip(scorers, 10.0 ** draw.integers(-6, 4, len(scorers)), strict=True)
        for number in range(10 if name == "random" else 1)
        for site in ("encoder_self", "decoder_self", "cross")
        for layer in range(2)
        for head in range(heads // 6)
    ]
    training = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0], "valid_loss": [2.1, 1.2]})
    return {
        "methods": pd.DataFrame(methods),
        "pruning": table,
        "oracle": pd.DataFrame(oracle),
        "agreement": pd.DataFrame(agreement),
        "heads": pd.DataFrame(scores),
        "training": training.assign(valid_quality=[0.1, 0.9]),
    }


def drawn(tables: dict[str, pd.DataFrame]) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw(Compare.figures, tables)}


NAMED = {
    "accuracy": figures.method_curves,
    "regret": figures.regret_map,
    "cost": quality_cost,
    "agreement": figures.agreement_matrix,
}


def one(tables: dict[str, pd.DataFrame], name: str) -> Plot:
    (plot,) = draw((NAMED[name],), tables)
    assert plot.name == name
    assert NAMED[name] in Compare.figures
    return plot


@pytest.mark.parametrize("case", ["all", *slow("three", "one", *SMALLER)])
def test_no_word_of_a_figure_is_clipped_or_covered(case: str) -> None:
    plots = drawn(method_tables(*CASES[case]))
    assert ("agreement" in plots) == (case != "one"), "one scorer agrees with no other"
    for plot in plots.values():
        check_legible(plot)
        assert plot.caption.endswith(".")
        assert all(axes.get_xlabel() or axes.get_ylabel() for axes in plot.figure.axes[-1:] if plot.name != "training")


@pytest.mark.slow
def test_the_same_tables_give_the_same_bytes() -> None:
    some = (("ablation", "taylor", "random"), 6)
    for first, second in zip(
        draw(Compare.figures, method_tables(*some)), draw(Compare.figures, method_tables(*some)), strict=True
    ):
        assert first.svg == second.svg, first.name
    assert one(crowded(0), "cost").svg == one(crowded(0), "cost").svg


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


def test_without_an_oracle_or_a_control_there_are_still_curves() -> None:
    tables = method_tables(("gate", "taylor"))
    del tables["oracle"]
    figure = one(tables, "accuracy").figure
    assert len(figure.axes[0].get_lines()) == 2
    assert not figure.legends


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
    assert "bold" not in plain.caption
    for chosen, limits, words in (
        ([best], [np.inf], f"{best} at any cost"),
        ([second], [np.inf], f"{second} at any cost"),
        ([second, best], [np.inf, 30.0], f"{second} at any cost and {best} with at most 30 forward passes"),
    ):
        winner = pd.DataFrame({"winner": chosen, "most_passes": limits})
        plot = one(tables | {"winner": winner}, "regret")
        labels = plot.figure.axes[0].get_yticklabels()
        assert {label.get_text() for label in labels if label.get_fontweight() == "bold"} == {
            f"▸ {name}" for name in chosen
        }
        assert [label.get_text().removeprefix("▸ ") for label in labels] == [
            label.get_text() for label in plain.figure.axes[0].get_yticklabels()
        ]
        assert "All numbers are of the report split." in plot.caption
        assert plot.caption.endswith(f" In bold is what does best on the choose split, and so is chosen: {words}.")
        check_legible(plot)


def crowded(seed: int) -> dict[str, pd.DataFrame]:
    """Every scorer but the control within three points, and half of them at the same cost."""
    tables = method_tables(seed=seed)
    methods = tables["methods"]
    for end in ("", "_low", "_high"):
        column = f"regret_quality{end}"
        methods[column] = methods[column].where(methods["scorer"] == "random", methods[column] / 5)
    methods.loc[methods["family"].isin(["gradient", "attention"]), ["forward_passes", "backward_passes"]] = (1, 1)
    return tables


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


def test_a_small_agreement_matrix_has_its_numbers() -> None:
    tables = method_tables(EVERY[:4])
    tables["agreement"].loc[3, "spearman"] = np.nan
    axes = one(tables, "agreement").figure.axes[0]
    assert (cells(axes) == "").sum() == 4 + 2, "the diagonal, and the pair without a number"


def test_families_of_one_scorer_each_do_not_make_a_long_title() -> None:
    tables = method_tables(EVERY[:7])
    for name in ("methods", "pruning"):
        tables[name]["family"] = tables[name]["scorer"].str.cat(["_of_its_own"] * len(tables[name]))
    plot = one(tables, "accuracy")
    check_legible(plot)
    titles = [axes.get_legend().get_title().get_text() for axes in plot.figure.axes]
    assert titles == ["7 families (1 of 2)", "7 families (2 of 2)"]
    assert min(axes.get_window_extent().width for axes in plot.figure.axes) > 0.35 * plot.figure.bbox.width


def test_the_best_subset_is_seen_below_a_curve_that_coincides() -> None:
    axes = one(method_tables(("gate", "random")), "accuracy").figure.axes[0]
    (best,) = (line for line in axes.get_lines() if line.get_label() == "best subset found")
    curve = axes.containers[0].lines[0]
    assert best.get_linewidth() > curve.get_markersize() > curve.get_linewidth()
    assert best.get_zorder() < curve.get_zorder()


def test_the_cost_figure_tells_the_best_apart() -> None:
    """Half a point is as far as ten points are from thirty."""
    axes = one(crowded(0), "cost").figure.axes[0]
    zero, half, ten, thirty = axes.transData.transform([(1, 0), (1, 0.5), (1, 10), (1, 30)])[:, 1]
    assert half - zero > 0.5 * (thirty - ten)


def test_pairs_with_what_is_no_scorer_are_not_in_the_matrix() -> None:
    tables = method_tables(("gate", "ablation", "random"))
    extra = pd.DataFrame([{"scorer": "gate", "other": "gate before training", "spearman": 0.7}])
    tables["agreement"] = pd.concat([tables["agreement"], extra], ignore_index=True)
    assert "gate before training" not in text_of(one(tables, "agreement"))
