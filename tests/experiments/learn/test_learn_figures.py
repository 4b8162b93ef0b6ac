"""The figures of `experiment=learn`: where one run reaches its target, and when many do."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D

from learnt import collected, history, run, sweep, tables
from mhaprune.experiments.learn.study import Learn
from mhaprune.reporting.plots import Plot, draw
from mhaprune.statistics.intervals import geometric_mean
from mhaprune.tables import Tables
from support.legible import check_legible
from support.made_tables import text_of
from support.sizes import slow


def over_runs(found: Tables) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw(Learn.figures_over_runs, found)}


def circles(axes: Axes, still_open: bool) -> list[Line2D]:
    lines = [line for line in axes.get_lines() if line.get_marker() == "o"]
    return [line for line in lines if (to_rgba(line.get_markerfacecolor()) == to_rgba("white")) == still_open]


def places(lines: list[Line2D]) -> list[tuple[float, int]]:
    """The time that every circle stands at, and its row."""
    return [(float(line.get_xdata()[0]), round(float(line.get_ydata()[0]))) for line in lines]


def arrows(axes: Axes) -> list[tuple[float, int]]:
    """The circles that an arrow starts at; each points to the right."""
    found = [text for text in axes.texts if getattr(text, "arrow_patch", None) is not None]
    assert all(text.xyann[0] > 0 and text.xyann[1] == 0 for text in found)
    return [(float(text.xy[0]), round(float(text.xy[1]))) for text in found]


@pytest.mark.parametrize("exact", [(0, 0.2, 0.995, 0.9, 0.99, 1.0, 1.0), (0, 0.1, 0.2, 0.9, 1.0), (0.0, 1.0)])
def test_one_run_marks_where_its_target_is_reached(exact: tuple[float, ...]) -> None:
    found = tables(history(*exact))
    [plot] = draw(Learn.figures, found)
    check_legible(plot)
    reached = found["reached"].iloc[0]
    for words in (f"step {reached['steps']}", f"{reached['seconds']:.3g} s", "target: 0.99"):
        assert words in text_of(plot)
    for axes, name in zip(plot.figure.axes, ("steps", "seconds"), strict=True):
        curve = axes.get_lines()[0]
        np.testing.assert_allclose(curve.get_ydata(), exact)
        [mark] = circles(axes, still_open=False)
        assert mark.get_xdata()[0] == reached[name]
        assert mark.get_ydata()[0] == exact[reached["steps"] // 10]
        assert not arrows(axes)
        assert axes.get_xlim()[1] > curve.get_xdata()[-1]
    assert plot.figure.axes[0].get_ylim() == plot.figure.axes[1].get_ylim()


def test_a_run_that_never_gets_there_is_drawn_open_at_its_end() -> None:
    [plot] = draw(Learn.figures, tables(history(0, 0.5, 0.995, 0.93)))
    check_legible(plot)
    for axes, end in zip(plot.figure.axes, (30, 0.6), strict=True):
        [mark] = circles(axes, still_open=True)
        assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (pytest.approx(end), 0.93)
        assert len(arrows(axes)) == 1
        assert any(text.get_text().startswith("not by") for text in axes.texts)


def test_times_stand_in_the_rows_of_their_settings() -> None:
    """In the order in which the settings first appear; a run that does not get there is open, with an arrow."""
    found = sweep(zeta=[40, 60, 80], alpha=[20, None, None], mid=[None, None, None])
    plot = over_runs(found)["time_to_accuracy"]
    check_legible(plot)
    reached = found["reached"]
    rows = ["rate=zeta", "rate=alpha", "rate=mid"]
    steps, seconds = plot.figure.axes
    assert [label.get_text() for label in steps.get_yticklabels()] == rows
    for axes, name in ((steps, "steps"), (seconds, "seconds")):
        assert axes.get_xscale() == "log"
        assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first on top"
        for there in (True, False):
            own = reached[reached["reached"] == there]
            expected = [(time, rows.index(row)) for time, row in zip(own[name], own["setting"], strict=True)]
            assert places(circles(axes, still_open=not there)) == expected
            assert there or arrows(axes) == expected
        assert axes.get_xlim()[0] < reached[name].min() < reached[name].max() < axes.get_xlim()[1]
    beside = {text.get_text(): text.get_position()[1] for text in seconds.texts if text.get_text()}
    assert beside == {"1 of 3": 1, "0 of 3": 2}
    legend = [text.get_text() for text in plot.figure.legends[0].get_texts()]
    assert legend == ["a run", "geometric mean, 95 % interval", "a run that does not get there"]


def test_a_mean_with_its_interval_is_drawn_only_where_all_runs_get_there() -> None:
    plot = over_runs(sweep(all=[40, 60, 80], some=[20, None, 30], one=[50]))["time_to_accuracy"]
    for axes, unit in zip(plot.figure.axes, (1, 0.02), strict=True):
        mean, low, high = unit * np.array(geometric_mean([40, 60, 80]))
        [bar] = [line for line in axes.get_lines() if line.get_marker() == "|"]
        assert (bar.get_xdata()[0], bar.get_ydata()[0]) == (pytest.approx(mean), 0)
        [interval] = axes.collections
        [segment] = interval.get_segments()
        np.testing.assert_allclose(segment, [(low, 0), (high, 0)])


@pytest.mark.parametrize("settings", [1, 12, *slow(2, 7, 30)])
def test_few_and_many_settings_can_be_read(settings: int) -> None:
    names = [f"training.learning_rate={0.001 * i:g}, training.label_smoothing={0.01 * i:g}" for i in range(settings)]
    runs = [
        ("sort", name, seed, run(10 * (i + 2 + seed), ms_per_step=20 + i, steps=300) if i < 25 else run(None))
        for i, name in enumerate(names)
        for seed in range(3)
    ]
    plots = over_runs(collected(runs))
    for plot in plots.values():
        check_legible(plot)
    shown = [
        label.get_text().replace("\n", " ") for label in plots["time_to_accuracy"].figure.axes[0].get_yticklabels()
    ]
    assert shown == names
    curves = plots["learning"].figure.axes
    assert len(curves) == 2 * -(-settings // 7), "as many settings in a row as there are colours"
    legends = [text.get_text() for axes in curves[1::2] for text in axes.get_legend().get_texts()]
    assert [text.replace("\n", " ") for text in legends if not text.startswith("target")] == names


def test_curves_of_a_setting_have_one_colour_and_a_mean() -> None:
    found = sweep(a=[40, 60], b=[20, None])
    plot = over_runs(found)["learning"]
    check_legible(plot)
    learning = found["learning"]
    for axes, column in zip(plot.figure.axes, ("step", "seconds"), strict=True):
        lines = [line for line in axes.get_lines() if len(line.get_xdata()) > 2]
        colours = [line.get_color() for line in lines]
        assert colours == [colours[0]] * 3 + [colours[3]] * 3
        assert colours[0] != colours[3]
        for i, label in enumerate(learning["label"].unique()):
            own = learning[learning["label"] == label]
            line = lines[i + i // 2]
            np.testing.assert_allclose(line.get_xdata(), own[column])
            np.testing.assert_allclose(line.get_ydata(), own["valid_quality"])
        mean = learning[learning["setting"] == "rate=a"].groupby("step")["valid_quality"].mean()
        np.testing.assert_allclose(lines[2].get_ydata(), mean)


def test_a_setting_has_its_colour_and_its_place_in_every_task() -> None:
    """Whichever of them comes first there, and where one is missing."""
    orders = (("sort", "abc"), ("copy", "cba"), ("reverse", "c"))
    plots = over_runs(collected((task, f"rate={name}", 0, run(40)) for task, names in orders for name in names))
    panels = plots["learning"].figure.axes[1::2]
    drawn = [{str(line.get_label()): line.get_color() for line in axes.get_lines()} for axes in panels]
    colours = [{name: colour for name, colour in own.items() if name.startswith("rate")} for own in drawn]
    assert list(colours[0]) == list(colours[1]) == ["rate=a", "rate=b", "rate=c"]
    assert len(set(colours[0].values())) == 3
    assert colours[1] == colours[0]
    assert colours[2] == {"rate=c": colours[0]["rate=c"]}
    rows = [[label.get_text() for label in axes.get_yticklabels()] for axes in plots["time_to_accuracy"].figure.axes]
    assert rows[::2] == [["rate=a", "rate=b", "rate=c"]] * 2 + [["rate=c"]]
