"""The figures of one run of `experiment=ablate`, and of several."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest

from mhaprune.experiments.ablate.report import latency_curves
from mhaprune.experiments.ablate.study import Ablate
from mhaprune.reporting.plots import Plot, draw
from mhaprune.reporting.shared_figures import agreement
from mhaprune.statistics.intervals import student_interval
from mhaprune.tables import Tables
from support.made_tables import all_tables, pruning_table, refitted, text_of


def drawn(tables: Tables) -> Iterator[Plot]:
    return draw(Ablate.figures, tables)


@pytest.fixture(scope="module")
def plots() -> dict[str, Plot]:
    """All figures of all tables."""
    return {plot.name: plot for plot in drawn(all_tables())}


def over_runs(tables: Tables) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw(Ablate.figures_over_runs, tables)}


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


def test_every_head_stands_at_its_cost_and_its_rank_by_another_score() -> None:
    """A score that is equal for all heads has no rank correlation, and the figure says so: never `nan`."""
    tables = all_tables()
    (plot,) = draw((agreement,), tables)
    costs = tables["heads"].query("scorer == 'ablation'")["score"]
    places = np.vstack([bars.lines[0].get_xydata() for bars in plot.figure.axes[0].containers])
    np.testing.assert_allclose(sorted(places.tolist()), np.c_[range(1, 5), costs])
    assert "Spearman ρ = 0.88" in text_of(plot)
    (equal,) = draw((agreement,), tables | {"agreement": tables["agreement"].assign(spearman=np.nan)})
    assert "no rank correlation" in text_of(equal)
    assert "nan" not in text_of(equal)


def test_speed_is_drawn_against_heads_removed_and_neither_mark_nor_noise_is_cut() -> None:
    tables = all_tables()
    noisy = tables["latency"].assign(speedup_q1=0.7, speedup_q3=9.0)
    for latency in (tables["latency"], noisy):
        (plot,) = draw((latency_curves,), tables | {"latency": latency})
        (axes,) = plot.figure.axes
        lines = {bars.get_label(): bars.lines[0] for bars in axes.containers}
        assert set(lines) == {"gate", "ablation"}, "one draw of a control is noise"
        for line in lines.values():
            np.testing.assert_allclose(np.asarray(line.get_xdata(), float), [0, 2, 4], atol=0.1)
            np.testing.assert_allclose(np.asarray(line.get_ydata(), float), [1, 1.5, 2])
        low, high = axes.get_ylim()
        assert low < min(1, latency["speedup_q1"].item())
        assert high > max(2, latency["speedup_q3"].item())


@pytest.mark.parametrize("missing", ["heads", "agreement", "pruning", "latency", "training"])
def test_what_cannot_be_drawn_is_left_out(missing: str, plots: dict[str, Plot]) -> None:
    tables = all_tables()
    del tables[missing]
    assert 0 < len(list(drawn(tables))) < len(plots)


def comparison_tables() -> Tables:
    labels = ("num_heads=2", "num_heads=4")
    return {
        "pruning": pd.concat([pruning_table(i).assign(label=label, setting=label) for i, label in enumerate(labels)])
    }


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


def test_more_settings_than_can_be_told_apart_are_not_drawn() -> None:
    many = {
        name: pd.concat([frame.assign(setting=f"width={i}", label=f"width={i}") for i in range(31)])
        for name, frame in comparison_tables().items()
    }
    assert not over_runs(many)
