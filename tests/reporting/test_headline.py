"""What a sweep is for, drawn and said: the first numbers of runs against the settings that vary."""

import math
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from mhaprune.lab.reporting.headline import Number, against_settings, means_in_latex, means_in_words, means_table
from mhaprune.lab.reporting.plots import COLOURS, STYLE, Plot, draw
from mhaprune.lab.reporting.settings import Setting, for_figures, setting
from mhaprune.statistics.intervals import prediction_interval, student_interval
from support.figures import check_legible
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
            Number(
                "heads that can be removed",
                int(heads) + seed + 2 * bool(each),
                6.0 * int(heads),
                each,
                0,
                6 * int(heads),
            ),
            Number("exact match", 0.99 - 0.01 * seed, 0.995, each, 0, 1),
        )
    ]
    return pd.DataFrame(rows)


def all_drawn(frame: pd.DataFrame, *names: str) -> list[Plot]:
    settings = settings_of(frame, *names)
    return list(draw((lambda _: against_settings(frame, settings),), {}))


def drawn(frame: pd.DataFrame, *names: str) -> Plot:
    [plot] = all_drawn(frame, *names)
    return plot


def settings_of(frame: pd.DataFrame, *names: str) -> list[Setting]:
    return [setting(name, frame[name]) for name in names]


def test_a_panel_per_number_has_a_mark_per_run_and_the_interval_of_their_mean() -> None:
    frame = numbers()
    plot = drawn(frame, "num_heads")
    panel = plot.figure.axes[0]
    marks = [np.asarray(found.get_offsets()) for found in panel.collections if isinstance(found, PathCollection)]
    small, large = [each for each in marks if len(each) == 3], [each for each in marks if len(each) == 1]
    counts = frame[frame["what"] == "heads that can be removed"]
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
    colours = {to_hex(line.get_color()) for line in two.figure.axes[0].get_lines()}
    assert colours == {style["color"] for style in setting("d_model", WIDTHS).styles.values()}
    assert {"d_model=64", "d_model=128"} <= {text.get_text() for text in two.figure.legends[0].get_texts()}
    assert len(two.figure.axes) == 2
    three = pd.concat([numbers(widths=WIDTHS).assign(task=task, label=task) for task in ("sort", "copy")])
    rows = drawn(three, "num_heads", "d_model", "task")
    assert [axes.get_title().partition("\n")[2] for axes in rows.figure.axes] == ["sort", "sort", "copy", "copy"]
    check_legible(rows)


def test_a_recovery_has_a_row_on_the_same_axis() -> None:
    first, _, below, _ = drawn(numbers(after=("", "refit")), "num_heads").figure.axes
    assert below.get_title() == "share of heads that can be removed\nafter refit"
    assert below.get_ylim() == first.get_ylim()
    assert (first.get_xlabel(), below.get_xlabel()) == ("", "num_heads")


def test_seeds_alone_are_drawn_too() -> None:
    frame = numbers()[lambda rows: rows["num_heads"] == "2"]
    assert "all runs" in text_of(drawn(frame))
    [heads, _, note] = means_in_words(frame, [])
    (low, high), (least, _) = student_interval([2.0, 3.0, 4.0]), prediction_interval([2.0, 3.0, 4.0])
    assert heads.startswith(f"Heads that can be removed: 3 ({low:.3g} to {high:.3g}; new run {max(least, 0):.3g} to ")
    assert "3 runs" in heads
    assert "one new model" in note
    assert "share their examples, new examples add scatter: 'task.seed=${seed}'" in note


def test_of_two_runs_there_are_the_values_and_no_interval() -> None:
    frame = numbers(seeds=2)
    heads, exact = means_in_words(frame, settings_of(frame, "num_heads"))
    assert heads == (
        "Share of heads that can be removed: 16.7 % and 33.3 % with num_heads=1; 16.7 % and 25.0 % with num_heads=2;"
        " 16.7 % and 20.8 % with num_heads=4."
    )
    assert exact.startswith("Exact match: 99.0 % and 98.0 % with")
    same = frame.assign(value=0.5)[lambda rows: rows["what"] == "exact match"]
    assert next(means_in_words(same[same["num_heads"] == "2"], [])) == "Exact match: 50.0 % each."
    axes_of = drawn(frame, "num_heads").figure.axes
    bars = [found for axes in axes_of for found in axes.collections if isinstance(found, LineCollection)]
    assert all(len(np.unique(np.asarray(bar.get_segments())[..., 1])) == 1 for bar in bars), "no interval is drawn"


def test_the_table_for_a_paper_has_a_row_per_setting_in_their_order() -> None:
    frame = numbers(after=("", "refit"))
    frame = frame[(frame["num_heads"] != "4") | ~frame["label"].str.endswith("2")].replace({"num_heads": {"1": "16"}})
    table = means_table(frame, settings_of(frame, "num_heads"))
    [exact] = table.query("number == 'exact match, after refit' and num_heads == '2'").to_dict("records")
    assert (exact["mean"], exact["models"]) == (pytest.approx(0.98), 3)
    assert exact["mean_low"] == pytest.approx(student_interval([0.99, 0.98, 0.97])[0])
    assert exact["mean_high"] == exact["new_high"] == 1, "no quality is above 1"
    assert table.query("num_heads == '4'")["mean_low"].isna().all(), "of two models there is no interval"
    head, *rows = [row.split(" & ") for row in means_in_latex(table).splitlines() if "&" in row]
    assert head[0] == "num\\_heads"
    assert "share of heads\\\\that can be\\\\removed (\\%)" in head[1], "short lines"
    assert [(row[0], row[-1]) for row in rows] == [("2", "3 \\\\"), ("4", "2 \\\\"), ("16", "3 \\\\")]
    assert "98.0\\\\{\\scriptsize [95.5, 100.0]}" in rows[0][2], "a plain number, its interval below it"
    lacking = table.drop(index=table.index[1]).assign(num_heads="[2]", text="-1.50 (-2.0 to 1)")
    latex = means_in_latex(lacking)
    assert latex.count("{}[2] & ") == latex.count("[2]") == 1, "LaTeX would read an option, and two rows would be one"
    assert "$-$1.50\\\\{\\scriptsize [$-$2.0, 1]}" in latex
    assert latex.rstrip().splitlines()[-3].endswith("3, 2 \\\\")


@pytest.mark.parametrize("name", ["2", "50 % & more_{$#}~^\\", "[2]", "*"])
def test_the_table_for_a_paper_compiles_as_it_is(name: str, tmp_path: Path) -> None:
    frame = numbers(after=("", "refit"))
    table = means_table(frame, settings_of(frame, "num_heads")).replace({"num_heads": {"2": name}})
    latex = means_in_latex(table)
    assert name != "*" or "{}*" in latex, "else LaTeX takes it for a part of the end of the row above"
    bare = re.sub(r"\\[a-z]+|\\.", "", latex)
    assert bare.count("{") == bare.count("}")
    assert not set(bare) & set("%#_^~"), "nothing that LaTeX would read as a command"
    cells = {len(row.replace("\\&", "").split("&")) for row in latex.splitlines() if "&" in row}
    assert cells == {latex.splitlines()[0].rpartition("{")[2].count("c") + 1}
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed")
    rules = "".join(rf"\let\{name}rule\hline" for name in ("top", "mid", "bottom"))
    used = rf"\IfFileExists{{booktabs.sty}}{{\usepackage{{booktabs}}}}{{{rules}}}"
    page = "\n".join([r"\documentclass{article}", used, r"\begin{document}", f"{latex}\\end{{document}}"])
    (tmp_path / "paper.tex").write_text(page)
    command = ["pdflatex", "-halt-on-error", "-interaction=batchmode", "paper.tex"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0, latex


def test_heads_out_of_different_totals_are_compared_by_their_shares() -> None:
    frame = numbers()
    heads = next(means_in_words(frame, settings_of(frame, "num_heads")))
    assert heads.startswith("Share of heads that can be removed: 33.3 % (")
    alike = frame.assign(whole=frame["whole"].where(frame["what"] == "exact match", 30), most=30.0)
    assert next(means_in_words(alike, settings_of(frame, "num_heads"))).startswith("Heads that can be removed: 2 (")


@pytest.mark.parametrize("values", [(0.0, 0.0, 4.0), (0.0, 4.0, 4.0), (1.0, 1.01, 1.02), (0.0,) * 3, (-2.5,) * 3])
def test_an_interval_stays_in_its_panel(values: tuple[float, ...]) -> None:
    """And equal runs are drawn without a warning."""
    frame = numbers(3).query("what == 'heads that can be removed' and num_heads == '2'")
    low, high = drawn(frame.assign(value=values, least=-math.inf, most=math.inf, whole=1.0)).figure.axes[0].get_ylim()
    assert low < student_interval(values)[0] <= student_interval(values)[1] < high


def test_a_number_that_a_run_lacks_is_not_drawn() -> None:
    """A mean of those that have it would be one of the lucky ones."""
    frame = numbers()
    frame.loc[(frame["what"] == "exact match") & (frame["label"] == "2-64-1"), "value"] = math.nan
    panels = [axes.get_title() for axes in drawn(frame, "num_heads").figure.axes]
    assert panels == ["share of heads that can be removed"]
    said = list(means_in_words(frame, settings_of(frame, "num_heads")))
    assert said[0] == "Exact match: not compared, 1 of 9 runs have no such number."
    assert not any(line.startswith("Exact match") for line in said[1:])
    assert not all_drawn(frame.assign(value=math.nan), "num_heads")


def test_what_cannot_be_told_apart_is_not_drawn() -> None:
    assert not all_drawn(numbers()[:2], "num_heads"), "one run"
    many = pd.concat([numbers().assign(d_model=str(i), label=str(i)) for i in range(30)])
    assert not all_drawn(many, "num_heads", "d_model")
    assert not all_drawn(pd.DataFrame(columns=[*Number._fields, "label"]))


@pytest.mark.parametrize(
    ("values", "order"),
    [
        (["4", "1", "2"], ["1", "2", "4"]),
        (["1e-3", "0.1", "1e-2"], ["1e-3", "1e-2", "0.1"]),
        (["sort", "copy"], ["sort", "copy"]),
        (["8", "null", "4"], ["8", "null", "4"]),
        (["nan", "1"], ["nan", "1"]),
    ],
)
def test_numbers_stand_in_their_order_and_anything_else_as_it_comes(values: list[str], order: list[str]) -> None:
    assert list(setting("x", [*values, *values]).values) == order


def test_numbers_have_one_ramp_and_words_the_usual_colours() -> None:
    styles = setting("num_heads", ["16", "8", "1", "2", "4"]).styles.values()
    ramp = np.array([to_rgb(style["color"]) for style in styles]) @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(ramp) < 0).all(), "the more, the darker"
    assert ramp[0] < 0.8, "still seen on white"
    words = setting("task", ["sort", "copy"])
    assert [style["color"] for style in words.styles.values()] == list(COLOURS[:2])


def test_a_figure_uses_numbers_before_words_and_many_values_before_few() -> None:
    few, many = setting("few", "12"), setting("many", "123")
    words, more = setting("words", "ab"), setting("more", "abcd")
    assert for_figures([words, few, more, many]) == [many, few, more, words]


def test_names_of_ticks_do_not_touch() -> None:
    found = setting("learning_rate", [f"{i}.25" for i in range(60)])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.4, 2.6))
        axes = figure.add_subplot()
        found.draw_axis(axes)
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axes.get_xticklabels() if text.get_text()]
    assert 3 <= len(boxes) < 20
    assert all(right.x0 > left.x1 for left, right in pairwise(boxes))


def test_the_whole_model_is_drawn_only_where_it_is_a_result_and_no_share_is_above_1() -> None:
    """That all heads of the whole model are there is no result."""
    same = numbers(seeds=3)
    counts, exact = drawn(same[same["num_heads"] == "2"], "num_heads").figure.axes[:2]  # of one total, so not shares
    assert counts.get_ylim()[1] < same["whole"].max()
    wholes = [
        [found for found in axes.collections if isinstance(found, LineCollection) and found.get_linewidths()[0] > 1.5]
        for axes in (counts, exact)
    ]
    assert not wholes[0]
    assert wholes[1]
    assert max(tick for tick in exact.get_yticks() if tick <= exact.get_ylim()[1]) <= 1
    assert "the line joins the means" in drawn(numbers(seeds=3), "num_heads").caption


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (Number("points", -0.06), "−0.1"),
        (Number("points", -0.01), "0.0"),
        (Number("times as fast", 1.344, 1.0), "1.34"),
        (Number("steps", 1200.0), "1,200"),
    ],
)
def test_a_number_has_a_real_minus_and_two_decimals_if_it_is_a_ratio(number: Number, shown: str) -> None:
    assert number.large == shown
