from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from mhaprune.heads import HeadId
from mhaprune.reporting import heat_map
from mhaprune.reporting.heat_map import similar_order, thinned
from mhaprune.reporting.labels import label_points
from mhaprune.reporting.plots import STYLE, Plot, correlation, plain, short
from mhaprune.reporting.sentences import if_poor
from mhaprune.tables import by_block
from support import PACKAGE, ROOT


def test_figures_and_words_need_no_torch(tmp_path: Path) -> None:
    """Only tables: so that many runs can be looked at where there is no torch."""
    paths = [*(PACKAGE / "reporting").glob("[!_]*.py"), PACKAGE / "tables.py"]
    paths += [path for name in ("figures", "words") for path in (PACKAGE / "experiments").glob(f"*/{name}.py")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    assert len(modules) > 12
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def named(points: np.ndarray, size: tuple[float, float]) -> tuple[list[Bbox], np.ndarray]:
    """Where the names of points of the unit square stand in a figure of that size, and the points, in pixels."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size)
        axes = figure.add_subplot(xlim=(0, 1), ylim=(-0.2, 1))
        names = [f"scorer_{i}" for i in range(len(points))]
        label_points(axes, names, points[:, 0], points[:, 1], np.full((2, len(points)), 0.05))
        figure.draw_without_rendering()
        return [Text.get_window_extent(text) for text in axes.texts], axes.transData.transform(points)


@pytest.mark.parametrize("seed", [3, 7, 15, 18, 19, 23])
def test_a_name_stands_nearest_to_its_own_point_and_no_line_to_a_point_runs_through_another_name(seed: int) -> None:
    """In heaps that leave the room for it."""
    draw = np.random.default_rng(seed)
    heaps = np.repeat(draw.uniform(0.2, 0.8, (4, 2)), 3, axis=0) + draw.normal(0, 0.05, (12, 2))
    boxes, points = named(heaps, (6, 4.5))
    for i, box in enumerate(boxes):
        gaps = np.linalg.norm(np.maximum(np.maximum(box.min - points, points - box.max), 0), axis=1)
        assert gaps[i] <= gaps.min() + 4
        line = np.linspace(points[i], (box.min + box.max) / 2, 100)
        assert not any(other.contains(*place) for other in boxes[:i] + boxes[i + 1 :] for place in line)


def test_no_name_covers_a_point_even_where_it_is_crowded() -> None:
    for seed in range(2):
        boxes, points = named(np.random.default_rng(seed).uniform(0.02, 0.98, (24, 2)), (4, 3))
        assert not any(box.padded(3).contains(*point) for box in boxes for point in points)


def lightness_of(name: str) -> np.ndarray:
    return matplotlib.colormaps[name](np.linspace(0, 1, 51))[:, :3] @ (0.2126, 0.7152, 0.0722)


def test_heat_maps_are_read_without_colour() -> None:
    """Every colour map grows darker all the way from white; a signed one in both directions."""
    for name in (heat_map.MATTERS, heat_map.LOST):
        assert (np.diff(lightness_of(name)) < 0).all(), name
    for name in (heat_map.EXTRA_COST, heat_map.ALIKE, heat_map.VALUES):
        lightness = lightness_of(name)
        assert (np.diff(lightness[:26]) > 0).all(), name
        assert (np.diff(lightness[25:]) < 0).all(), name


def test_a_colour_means_the_same_in_every_figure() -> None:
    """A figure takes its colour map from the list that says what it means."""
    paths = [*PACKAGE.glob("reporting/*.py"), *PACKAGE.glob("experiments/*/*figure*.py")]
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


def test_what_is_alike_stands_side_by_side() -> None:
    """Three heaps of rows, shuffled: none is taken apart."""
    heaps = np.array([0, 1, 2, 1, 0, 2, 2, 0, 1])
    alike = np.where(heaps[:, None] == heaps, 0.9, 0.1)
    alike[0, 1] = alike[1, 0] = np.nan
    order = similar_order(alike)
    assert sorted(order) == list(range(9))
    assert (np.diff(heaps[order]) != 0).sum() == 2
    assert order.index(0) < 5
    assert similar_order(np.eye(2)) == [0, 1]
    assert similar_order(np.full((3, 3), np.nan)) == similar_order(np.zeros((3, 3)))


@pytest.mark.parametrize(
    ("rho", "text"),
    [
        (0.874, "0.87"),
        (0.9957, "0.996"),
        (0.99996, "0.99996"),
        (1.0, "1.00"),
        (-0.999, "−0.999"),
        (np.nan, "–"),
        (0, "0.00"),
    ],
)
def test_a_correlation_that_is_not_1_is_not_written_so(rho: float, text: str) -> None:
    assert correlation(rho) == text


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


def test_powers_of_ten_are_text() -> None:
    svg = drawn().svg.decode()
    assert re.search(">10⁻[¹²³]</text>", svg)
    assert "mathdefault" not in svg


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (r"$\mathdefault{10^{-3}}$", "10⁻³"),
        (r"$\mathdefault{-10^{12}}$", "−10¹²"),
        (r"$\mathdefault{2\times10^{0}}$", "2×10⁰"),
        (r"$\mathdefault{0}$", "0"),
        ("0.5", "0.5"),
        ("", ""),
    ],
)
def test_a_formula_for_a_power_becomes_text(formula: str, text: str) -> None:
    assert plain(formula) == text


def test_the_heads_of_a_block_are_listed_together() -> None:
    heads = [HeadId.parse(name) for name in ("cross.1.0", "model.layer.0.3", "cross.1.11", "cross.0.2")]
    assert by_block(heads) == "cross.1: 0 11, model.layer.0: 3, cross.0: 2"


@pytest.mark.parametrize(("reached", "warned"), [(0.76, True), (0.8, False), (1.0, False)])
def test_a_poor_model_is_said_to_be_one(reached: float, warned: bool) -> None:
    lines = list(if_poor({"training": pd.DataFrame({"valid_quality": [0.9 - reached, reached]})}))
    assert len(lines) == warned
    assert all(line.startswith("Beware: the model itself is poor, 0.760 exact match at the end") for line in lines)


def test_nothing_is_said_of_a_model_that_was_not_trained_here() -> None:
    assert not list(if_poor({"summary": pd.DataFrame({"quality": [0.0]})}))
