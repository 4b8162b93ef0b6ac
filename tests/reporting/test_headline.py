"""What a sweep is for, drawn and said: the first numbers of runs against the settings that vary."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex

from mhaprune.reporting.headline import Number, against_settings, means_in_words
from mhaprune.reporting.plots import Plot, draw
from mhaprune.reporting.settings import Setting, setting
from mhaprune.statistics.intervals import prediction_interval, student_interval
from support.legible import check_legible
from support.made_tables import text_of

HEADS, WIDTHS = ("4", "1", "2"), ("64", "128")


def numbers(seeds: int = 3, widths: tuple[str, ...] = ("64",), after: tuple[str, ...] = ("",)) -> pd.DataFrame:
    """Runs: the more heads there are, the more can go, and more after a refit."""
    rows = [
        number._asdict() | {"label": f"{heads}-{width}-{seed}", "num_heads": heads, "d_model": width}
        for heads in HEADS
        for width in widths
        for seed in range(seeds)
        for each in after
        for number in (
            Number("heads that can go", int(heads) + seed + 2 * bool(each), 6.0 * int(heads), each, 0, 6 * int(heads)),
            Number("exact match", 0.99 - 0.01 * seed, 0.995, each, 0, 1),
        )
    ]
    return pd.DataFrame(rows)


def drawn(frame: pd.DataFrame, *names: str) -> Plot | None:
    settings = settings_of(frame, *names)
    plots = list(draw((lambda _: against_settings(frame, settings),), {}))
    return plots[0] if plots else None


def settings_of(frame: pd.DataFrame, *names: str) -> list[Setting]:
    return [setting(name, frame[name]) for name in names]


def test_a_panel_per_number_has_a_mark_per_run_and_the_interval_of_their_mean() -> None:
    frame = numbers()
    plot = drawn(frame, "num_heads")
    assert plot is not None
    panel = plot.figure.axes[0]
    marks = [np.asarray(found.get_offsets()) for found in panel.collections if isinstance(found, PathCollection)]
    small, large = [each for each in marks if len(each) == 3], [each for each in marks if len(each) == 1]
    counts = frame[frame["what"] == "heads that can go"]
    by_heads = (counts["value"] / counts["whole"]).groupby(counts["num_heads"])
    for i, heads in enumerate(("1", "2", "4")):  # a logarithmic scale
        runs = by_heads.get_group(heads)
        assert sorted(small[i][:, 1]) == sorted(runs)
        assert large[i][0] == pytest.approx((i, runs.mean()))
    bars = [found for found in panel.collections if isinstance(found, LineCollection)]
    spans = [np.asarray(bar.get_segments())[0, :, 1] for bar in bars if bar.get_linewidths()[0] < 1.5]
    low, high = student_interval(by_heads.get_group("4"))
    assert spans[2] == pytest.approx((max(low, 0), min(high, 1)))
    low, _ = student_interval(by_heads.get_group("1"))
    assert low < 0 == spans[0][0], "there are no fewer heads than none"
    assert [text.get_text() for text in panel.get_xticklabels()] == ["1", "2", "4"]
    assert "the whole model" in text_of(plot)
    assert "95 % interval" in plot.caption
    check_legible(plot)


def test_a_second_setting_is_told_by_colours_in_a_ramp_and_a_third_by_rows() -> None:
    two = drawn(numbers(widths=WIDTHS), "num_heads", "d_model")
    assert two is not None
    colours = {to_hex(line.get_color()) for line in two.figure.axes[0].get_lines()}
    assert colours == {style["color"] for style in setting("d_model", WIDTHS).styles.values()}
    assert {"d_model=64", "d_model=128"} <= {text.get_text() for text in two.figure.legends[0].get_texts()}
    assert len(two.figure.axes) == 2
    three = pd.concat([numbers(widths=WIDTHS).assign(task=task, label=task) for task in ("sort", "copy")])
    rows = drawn(three, "num_heads", "d_model", "task")
    assert rows is not None
    assert len(rows.figure.axes) == 4
    assert [axes.get_title().partition("\n")[2] for axes in rows.figure.axes] == ["sort", "sort", "copy", "copy"]
    check_legible(rows)


def test_a_recovery_has_a_row_on_the_same_axis() -> None:
    plot = drawn(numbers(after=("", "refit")), "num_heads")
    assert plot is not None
    first, _, below, _ = plot.figure.axes
    assert below.get_title() == "share of heads that can go\nafter refit"
    assert below.get_ylim() == first.get_ylim()
    assert (first.get_xlabel(), below.get_xlabel()) == ("", "num_heads")


def test_seeds_alone_are_drawn_too() -> None:
    frame = numbers()[lambda rows: rows["num_heads"] == "2"]
    plot = drawn(frame)
    assert plot is not None
    assert "all runs" in text_of(plot)
    [heads, _, note] = means_in_words(frame, [])
    (low, high), (least, _) = student_interval([2.0, 3.0, 4.0]), prediction_interval([2.0, 3.0, 4.0])
    assert heads.startswith(f"Heads that can go: 3 ({low:.3g} to {high:.3g}; new run {max(least, 0):.3g} to ")
    assert "3 runs" in heads
    assert "one new run" in note


def test_of_two_runs_there_are_the_values_and_no_interval() -> None:
    frame = numbers(seeds=2)
    heads, exact = means_in_words(frame, settings_of(frame, "num_heads"))
    assert heads == (
        "Share of heads that can go: 0.167 and 0.333 with num_heads=1; 0.167 and 0.25 with num_heads=2;"
        " 0.167 and 0.208 with num_heads=4."
    )
    assert exact.startswith("Exact match: 0.99 and 0.98 with")
    same = frame.assign(value=0.5)[lambda rows: rows["what"] == "exact match"]
    assert next(means_in_words(same[same["num_heads"] == "2"], [])) == "Exact match: 0.5 and 0.5."
    plot = drawn(frame, "num_heads")
    assert plot is not None
    bars = [found for axes in plot.figure.axes for found in axes.collections if isinstance(found, LineCollection)]
    assert all(len(np.unique(np.asarray(bar.get_segments())[..., 1])) == 1 for bar in bars), "no interval is drawn"


def test_heads_out_of_different_totals_are_compared_by_their_shares() -> None:
    frame = numbers()
    heads = next(means_in_words(frame, settings_of(frame, "num_heads")))
    assert heads.startswith("Share of heads that can go: 0.333 (")
    alike = frame.assign(whole=frame["whole"].where(frame["what"] == "exact match", 30), most=30.0)
    assert next(means_in_words(alike, settings_of(frame, "num_heads"))).startswith("Heads that can go: 2 (")


@pytest.mark.parametrize("values", [(0.0, 0.0, 4.0), (0.0, 4.0, 4.0), (1.0, 1.01, 1.02)])
def test_an_interval_stays_in_its_panel(values: tuple[float, ...]) -> None:
    frame = numbers(3).query("what == 'heads that can go' and num_heads == '2'")
    plot = drawn(frame.assign(value=values, least=-math.inf, most=math.inf, whole=1.0))
    assert plot is not None
    low, high = plot.figure.axes[0].get_ylim()
    assert low < student_interval(values)[0] < student_interval(values)[1] < high


def test_a_number_that_a_run_lacks_is_not_drawn() -> None:
    """A mean of those that have it would be one of the lucky ones."""
    frame = numbers()
    frame.loc[(frame["what"] == "exact match") & (frame["label"] == "2-64-1"), "value"] = math.nan
    plot = drawn(frame, "num_heads")
    assert plot is not None
    assert [axes.get_title() for axes in plot.figure.axes] == ["share of heads that can go"]
    assert len(list(means_in_words(frame, settings_of(frame, "num_heads")))) == 2
    assert drawn(frame.assign(value=math.nan), "num_heads") is None


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-12])
def test_equal_runs_are_drawn_without_a_warning(value: float) -> None:
    plot = drawn(numbers().assign(value=value, whole=math.nan, least=min(value, 0.0), most=9.0), "num_heads")
    assert plot is not None
    low, high = plot.figure.axes[0].get_ylim()
    assert low < value < high


def test_what_cannot_be_told_apart_is_not_drawn() -> None:
    assert drawn(numbers()[:2], "num_heads") is None, "one run"
    many = pd.concat([numbers().assign(d_model=str(i), label=str(i)) for i in range(30)])
    assert drawn(many, "num_heads", "d_model") is None
    assert drawn(many, "d_model", "num_heads") is not None
    assert drawn(pd.DataFrame(columns=[*Number._fields, "label"])) is None
