from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from mhaprune.heads import HeadId
from mhaprune.reporting import heat_map
from mhaprune.reporting.heat_map import thinned
from mhaprune.reporting.plots import STYLE, Plot, room_for, short
from mhaprune.reporting.sentences import if_poor
from mhaprune.tables import by_block
from support import PACKAGE, ROOT


def test_figures_and_words_need_no_torch(tmp_path: Path) -> None:
    """Only tables: so that many runs can be looked at where there is no torch."""
    paths = [*(PACKAGE / "reporting").glob("[!_]*.py"), PACKAGE / "tables.py"]
    paths += (PACKAGE / "experiments").glob("*/report.py")
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    assert len(modules) > 12
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def lightness_of(name: str) -> np.ndarray:
    return matplotlib.colormaps[name](np.linspace(0, 1, 51))[:, :3] @ (0.2126, 0.7152, 0.0722)


def test_heat_maps_are_read_without_colour() -> None:
    """Every colour map grows darker all the way from white; a signed one in both directions."""
    for name in (heat_map.MATTERS, heat_map.LOST):
        assert (np.diff(lightness_of(name)) < 0).all(), name
    for name in (heat_map.EXTRA_COST, heat_map.VALUES):
        lightness = lightness_of(name)
        assert (np.diff(lightness[:26]) > 0).all(), name
        assert (np.diff(lightness[25:]) < 0).all(), name


def test_a_colour_means_the_same_in_every_figure() -> None:
    """A figure takes its colour map from the list that says what it means."""
    paths = [*PACKAGE.glob("reporting/*.py"), *PACKAGE.glob("experiments/*/report.py")]
    for path in paths:
        own = set(re.findall(r"""["'](Blues|Reds|RdBu\w*|PuOr\w*|cividis\w*|\w*viridis\w*)["']""", path.read_text()))
        assert not own or path.stem in ("heat_map", "settings"), (path, own)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (2.876, "2.88"),
        (-0.034, "−0.03"),
        (20.94, "20.9"),
        (357.4, "357"),
        (4.2e-5, "4e−5"),
        (-0.002, "−2e−3"),
        (12345.0, "1e4"),
        (np.nan, "–"),
        (-np.inf, "−∞"),
    ],
)
def test_a_short_number_fits_into_a_cell(value: float, words: str) -> None:
    assert short(value) == words


def test_names_are_thinned_to_what_fits() -> None:
    assert thinned("abcd", 4) == list("abcd")
    assert thinned("abcde", 2) == ["a", "", "", "d", ""]
    assert thinned("abc", 0) == ["a", "", ""]


def figure_of_all_kinds() -> Figure:
    """Log axes, a twin, titles with ticks above, labels, a legend that hides least, a colour bar."""
    figure = Figure(figsize=(7, 5))
    (log, twin), (image, empty) = figure.subplots(2, 2)
    log.plot([1, 2, 3], [1e-3, 10, 1e4], label="a line")
    log.set(yscale="log", ylabel="loss", xlabel="step", title="both")
    log.legend()
    other = twin.twinx()
    other.plot([0, 1], [100000.5, 100000.9])
    other.set_ylabel("exact match")
    twin.set(xlabel="heads removed")
    drawn = image.imshow(np.arange(4).reshape(2, 2))
    image.xaxis.tick_top()
    image.set_title("above the ticks")
    figure.colorbar(drawn)
    empty.set_axis_off()
    return figure


def drawn() -> Plot:
    with matplotlib.rc_context(STYLE):
        return Plot("all", "", figure_of_all_kinds())


def test_both_files_are_the_same_byte_for_byte() -> None:
    first, second = drawn(), drawn()
    assert first.svg == second.svg
    assert first.png == second.png == drawn().png, "whatever was drawn before"


def test_the_heads_of_a_block_are_listed_together() -> None:
    heads = [HeadId.parse(name) for name in ("cross.1.0", "model.layer.0.3", "cross.1.11", "cross.0.2")]
    assert by_block(heads) == "cross.1: 0 11, model.layer.0: 3, cross.0: 2"


@pytest.mark.parametrize(("reached", "warned"), [(0.76, True), (0.8, False), (1.0, False)])
def test_a_poor_model_is_said_to_be_one(reached: float, warned: bool) -> None:
    assert not list(if_poor({"summary": pd.DataFrame({"quality": [0.0]})})), "one that was not trained here"
    lines = list(if_poor({"training": pd.DataFrame({"valid_quality": [0.9 - reached, reached]})}))
    assert len(lines) == warned
    assert all(line.startswith("Beware: the model itself is poor, 0.760 exact match at the end") for line in lines)


@pytest.mark.parametrize(
    ("values", "ends", "low", "high"),
    [
        ([1.0, 3.0], [], 1.0, 3.0),
        ([1.0, 3.0], [0.5, 4.0], 0.5, 4.0),
        ([1.0, 3.0], [-50.0, 60.0], -1.0, 5.0),
        ([1.0, 3.0], [math.nan], 1.0, 3.0),
        ([0.0], [], 0.0, 0.0),
    ],
)
def test_there_is_room_for_all_values_and_for_ends_that_are_not_far(
    values: list[float], ends: list[float], low: float, high: float
) -> None:
    left, right = room_for(pd.Series(values), ends)
    margin = 0.06 * (high - low or 1.0)
    assert (left, right) == pytest.approx((low - margin, high + margin))
