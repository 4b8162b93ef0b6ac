"""The figures of one run of `experiment=ablate`, and of several."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

from made_tables import all_tables, pruning_table, refitted, text_of
from mhaprune.experiments.ablate.figures import latency_curves
from mhaprune.experiments.ablate.study import Ablate
from mhaprune.reporting.plots import COLOURS, CONTROL_COLOUR, Plot, draw
from mhaprune.statistics.intervals import student_interval
from mhaprune.tables import Tables


def drawn(tables: Tables) -> Iterator[Plot]:
    return draw(Ablate.figures, tables)


@pytest.fixture(scope="module")
def plots() -> dict[str, Plot]:
    """All figures of all tables."""
    return {plot.name: plot for plot in drawn(all_tables())}


def over_runs(tables: Tables) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw(Ablate.figures_over_runs, tables)}


def test_every_figure_is_labelled_and_says_what_it_shows(plots: dict[str, Plot]) -> None:
    assert len(plots) == len(Ablate.figures)
    for plot in plots.values():
        bottom = [axes for axes in plot.figure.axes if (spec := axes.get_subplotspec()) and spec.is_last_row()]
        assert any(axes.get_xlabel() for axes in bottom), plot.name
        assert plot.caption.endswith(".")
        assert plot.png.startswith(b"\x89PNG")
    assert "heads removed, of 4" in text_of(plots["accuracy"])
    assert "random (3 draws)" in text_of(plots["accuracy"])
    assert "Spearman ρ = 0.88" in text_of(plots["agreement"])
    assert "dense against itself" in text_of(plots["latency"])
    assert "cross 0" in text_of(plots["heads"])
    assert "held-out exact match" in text_of(plots["training"])


def test_a_recovery_is_drawn_beside_the_curve_of_its_scorer() -> None:
    tables = all_tables()
    tables["recovered"] = refitted(tables["pruning"], quality=0.9)
    plot = next(plot for plot in drawn(tables) if plot.name == "accuracy")
    (axes,) = plot.figure.axes
    lines = {line.get_label(): line for line in axes.containers if line.get_label()}
    plain, after = (lines[name].lines[0] for name in ("ablation", "ablation, then refit"))  # type: ignore[attr-defined]
    assert plain.get_color() == after.get_color()
    assert plain.get_linestyle() != after.get_linestyle()
    np.testing.assert_allclose(np.asarray(after.get_ydata(), dtype=float), 0.9)
    assert plot.caption.endswith("what is left recovered.")


def test_a_score_that_is_the_same_for_all_heads_has_no_rank_correlation_and_the_figure_says_so() -> None:
    """As the gates of a model with one head per layer: never `nan`, and not left out in silence."""
    tables = all_tables()
    heads = tables["heads"]
    tables["heads"] = heads.assign(score=heads["score"].where(heads["scorer"] != "gate", 1.0))
    tables["agreement"] = tables["agreement"].assign(spearman=np.nan)
    plot = next(plot for plot in drawn(tables) if plot.name == "agreement")
    assert "all scores equal: no ranks to compare" in text_of(plot)
    assert "nan" not in text_of(plot)
    tables["heads"] = heads[(heads["site"] == "cross") & (heads["head"] == 0)]
    one = next(plot for plot in drawn(tables) if plot.name == "agreement")
    assert "one head: no ranks to compare" in text_of(one)


def test_a_ring_marks_what_can_go_surely() -> None:
    tables = all_tables()
    plain = next(plot for plot in drawn(tables) if plot.name == "accuracy")
    tables["recovered"] = refitted(tables["pruning"], quality=0.9)
    summary = pd.DataFrame({"scorer": ["gate", "ablation", "random"], "heads_removed_sure": [2, 2, 4]})
    after = pd.DataFrame({"scorer": ["ablation"], "heads_removed_sure": [4]})
    tables["summary"] = pd.concat([summary.assign(recovery="nothing"), after.assign(recovery="refit")])
    plot = next(plot for plot in drawn(tables) if plot.name == "accuracy")
    (axes,) = plot.figure.axes
    rings = [line for line in axes.get_lines() if line.get_markersize() > 10]
    sizes = [ring.get_markersize() for ring in rings]
    assert sizes[0] < sizes[1], "or equal ones would hide each other"
    places = [tuple(float(np.asarray(ends).item()) for ends in ring.get_data()) for ring in rings]
    curve = tables["pruning"].set_index(["scorer", "heads_removed"])["quality"]
    assert places == [(2, curve["gate", 2].item()), (2, curve["ablation", 2].item()), (4, 0.9)]
    assert "can go surely" in text_of(plot)
    assert plot.caption.endswith(" Rings: the most heads that surely can go, at 95 % confidence on the choose split.")
    assert "surely" not in text_of(plain) + plain.caption
    tables["summary"] = tables["summary"].assign(heads_removed_sure=0)
    none = next(plot for plot in drawn(tables) if plot.name == "accuracy")
    assert "surely" not in text_of(none) + none.caption


def test_speed_is_drawn_against_heads_removed_and_says_what_is_still_good() -> None:
    tables = all_tables()
    tables["pruning"]["quality"] = np.where(tables["pruning"]["heads_removed"] < 4, 0.99, 0.2)
    (plot,) = draw((latency_curves,), tables)
    (axes,) = plot.figure.axes
    assert axes.get_xlabel() == "heads removed, of 4"
    lines = {bars.get_label(): bars.lines[0] for bars in axes.containers}
    assert set(lines) == {"gate", "ablation"}, "one draw of a control is noise"
    for line in lines.values():
        np.testing.assert_allclose(np.asarray(line.get_xdata(), float), [0, 2, 4], atol=0.1)
        np.testing.assert_allclose(np.asarray(line.get_ydata(), float), [1, 1.5, 2])
    filled = [
        line for line in axes.get_lines() if line.get_zorder() > max(each.get_zorder() for each in lines.values())
    ]
    assert [list(np.asarray(line.get_xdata(), float).round()) for line in filled] == [[0, 2], [0, 2]]
    assert "filled: loses ≤ 0.01" in text_of(plot)


def test_neither_the_noise_nor_a_bar_of_speed_is_cut_in_silence() -> None:
    tables = all_tables()
    (plot,) = draw((latency_curves,), tables)
    assert "an arrow at the edge" not in plot.caption
    noisy = tables["latency"].assign(speedup_q1=0.7, speedup_q3=9.0)
    (plot,) = draw((latency_curves,), tables | {"latency": noisy})
    low, high = plot.figure.axes[0].get_ylim()
    assert low < 0.7
    assert high > 9
    long = tables["pruning"].assign(speedup_q3=20.0)
    (plot,) = draw((latency_curves,), tables | {"pruning": long})
    marks = [line.get_marker() for line in plot.figure.axes[0].get_lines()]
    assert marks.count("^") == 6, "two scorers, three sizes"
    assert "an arrow at the edge" in plot.caption


@pytest.mark.parametrize("name", ["accuracy", "agreement", "latency"])
def test_the_legend_is_above_the_lines(plots: dict[str, Plot], name: str) -> None:
    figure = plots[name].figure
    figure.draw_without_rendering()
    (legend,) = figure.legends
    for axes in figure.axes:
        assert axes.get_legend() is None
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_runs_with_and_without_a_recovery_are_compared() -> None:
    tables = comparison_tables()
    after = refitted(tables["summary"], heads_removed=3)
    tables = {**tables, "summary": pd.concat([tables["summary"], after], ignore_index=True)}
    plot = over_runs(tables)["runs"]
    assert "after refit" in text_of(plot)
    assert "Recovered are the models" in plot.caption
    assert "refit" not in text_of(over_runs(comparison_tables())["runs"])


def test_the_heat_map_leaves_removed_heads_empty(plots: dict[str, Plot]) -> None:
    """Head 1 of `cross` does not exist; the numbers that do are all there, each in its own cell."""
    values = plots["heads"].figure.axes[0].images[0].get_array()
    assert values is not None
    np.testing.assert_array_equal(np.isnan(np.ma.filled(values, np.nan)), [[False, False, True], [False, True, False]])


def test_the_same_tables_give_the_same_bytes(plots: dict[str, Plot]) -> None:
    for first, second in zip(plots.values(), drawn(all_tables()), strict=True):
        assert first.svg == second.svg, first.name
        assert first.png == second.png, first.name


@pytest.mark.parametrize("missing", ["heads", "agreement", "pruning", "latency", "training", "answers"])
def test_what_cannot_be_drawn_is_left_out(missing: str, plots: dict[str, Plot]) -> None:
    tables = all_tables()
    del tables[missing]
    assert 0 < len(list(drawn(tables))) < len(plots)


def test_a_single_scorer_and_a_model_without_gates_drawn(plots: dict[str, Plot]) -> None:
    tables = all_tables()
    for name in ("heads", "pruning"):
        tables[name] = tables[name][tables[name]["scorer"] == "ablation"]
    tables["agreement"] = tables["agreement"].iloc[:0]
    tables["training"] = tables["training"][["step", "loss", "valid_loss", "valid_quality"]]
    assert set(plots) - {plot.name for plot in drawn(tables)} == {"agreement"}


def comparison_tables() -> Tables:
    labels = ("num_heads=2", "num_heads=4")
    pruning = pd.concat([pruning_table(i).assign(label=label, setting=label) for i, label in enumerate(labels)])
    summary = pd.DataFrame(
        {
            "label": label,
            "setting": label,
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
    plots = over_runs(comparison_tables())
    assert plots
    for plot in plots.values():
        assert "num_heads=2" in text_of(plot)
        assert "num_heads=4" in text_of(plot)


def test_a_control_is_grey_and_takes_no_colour_from_a_scorer() -> None:
    """A scorer has the colour that it has in the figures of one run."""
    tables = comparison_tables()
    control = tables["summary"].query("scorer == 'gate'").assign(scorer="random")
    plot = over_runs({**tables, "summary": pd.concat([control, tables["summary"]], ignore_index=True)})["runs"]
    wanted = {"random": CONTROL_COLOUR, "gate": COLOURS[0], "ablation": COLOURS[1]}
    marks = [mark for mark in plot.figure.axes[0].collections if mark.get_label() in wanted]
    colours = {mark.get_label(): to_hex(mark.get_facecolor()[0]) for mark in marks}  # type: ignore[index]
    assert colours == {name: colour.lower() for name, colour in wanted.items()}


def test_a_run_keeps_its_colour_and_its_place_in_the_legend_in_every_panel() -> None:
    """Also where the first panel's scorer was not run everywhere."""
    tables = dict(comparison_tables())
    pruning = tables["pruning"]
    tables["pruning"] = pruning[~((pruning["label"] == "num_heads=2") & (pruning["scorer"] == "gate"))]
    figure = over_runs(tables)["comparison"].figure
    colours = {(line.get_label(), line.get_color()) for axes in figure.axes for line in axes.get_lines()}
    assert len(colours) == 2
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"num_heads=2", "num_heads=4"}


def test_runs_that_differ_in_their_seed_are_one_line_with_an_interval() -> None:
    tables = {
        name: pd.concat([frame.assign(label=frame["label"] + f", seed={i}") for i in range(3)])
        for name, frame in comparison_tables().items()
    }
    tables["pruning"]["quality"] += tables["pruning"]["label"].str[-1].astype(int) / 100
    plots = over_runs(tables)
    lines = [line for axes in plots["comparison"].figure.axes for line in axes.get_lines()]
    assert len(lines) == 2 * 3, "two settings and three scorers"
    own = tables["pruning"].query("scorer == 'gate' and setting == 'num_heads=4' and heads_removed == 2")["quality"]
    line = next(line for line in plots["comparison"].figure.axes[0].get_lines() if line.get_label() == "num_heads=4")
    assert np.asarray(line.get_ydata())[1] == pytest.approx(own.mean())
    [_, band] = plots["comparison"].figure.axes[0].collections
    heights = np.asarray(band.get_paths()[0].vertices)
    assert set(heights[heights[:, 0] == 0.5, 1].round(9)) == set(np.round(student_interval(own), 9))
    assert "95 % intervals" in plots["comparison"].caption
    assert "a small mark per run" in plots["runs"].caption


def test_an_interval_over_runs_stays_in_its_panel() -> None:
    summary = comparison_tables()["summary"]
    runs = [summary.assign(label=summary["label"] + f", seed={i}", speedup=1.1 + 0.4 * (i > 0)) for i in range(3)]
    plot = over_runs({"summary": pd.concat(runs, ignore_index=True)})["runs"]
    axes = next(axes for axes in plot.figure.axes if axes.get_title() == "speed-up there")
    low, high = axes.get_xlim()
    least, most = student_interval([1.1, 1.5, 1.5])
    assert low < least < most < high
    assert high - low < 1.4


def test_the_interval_of_a_share_ends_where_a_share_does() -> None:
    summary = comparison_tables()["summary"]
    runs = [summary.assign(label=summary["label"] + f", seed={i}", heads_removed=4 * (i > 0)) for i in range(3)]
    plot = over_runs({"summary": pd.concat(runs, ignore_index=True)})["runs"]
    shares = plot.figure.axes[0]
    bars = [np.asarray(each.get_segments()) for each in shares.collections if isinstance(each, LineCollection)]
    assert {(bar[..., 0].min(), bar[..., 0].max()) for bar in bars} == {(0.0, 1.0)}


def test_more_settings_than_can_be_told_apart_are_not_drawn() -> None:
    many = {
        name: pd.concat([frame.assign(setting=f"width={i}", label=f"width={i}") for i in range(31)])
        for name, frame in comparison_tables().items()
    }
    assert not over_runs(many)


def test_the_same_runs_give_the_same_bytes() -> None:
    tables = comparison_tables()
    for first, second in zip(over_runs(tables).values(), over_runs(tables).values(), strict=True):
        assert first.svg == second.svg, first.name
        assert first.png == second.png, first.name
