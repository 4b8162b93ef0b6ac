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
from mhaprune.figures import draw

from conftest import ROOT
from mhaprune.reporting.labels import label_points
from mhaprune.reporting.plots import STYLE, Plot


def pruning_table(seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    rows = []
    for scorer, draws in (("gate", 1), ("ablation", 1), ("random", 3)):
        for number in range(draws):
            for removed in (0, 2, 4):
                share = (4 - removed) / 4 * draw.uniform(0.8, 1)
                speed = {"speedup": 1 + removed / 4, "speedup_q1": 0.9 + removed / 4, "speedup_q3": 1.1 + removed / 4}
                rows.append(
                    {
                        "scorer": scorer,
                        "draw": number,
                        "heads_total": 4,
                        "heads_removed": removed,
                        "fraction_removed": removed / 4,
                        "sequence_accuracy": share,
                        "sequence_accuracy_low": share - 0.05,
                        "sequence_accuracy_high": share + 0.05,
                        **(speed if number == 0 else {}),
                    }
                )
    return pd.DataFrame(rows)


def all_tables() -> dict[str, pd.DataFrame]:
    heads = [("encoder_self", 0, 0), ("encoder_self", 0, 1), ("cross", 0, 0), ("cross", 0, 2)]
    scores = [
        {"scorer": scorer, "draw": 0, "site": s, "layer": layer, "head": h, "score": i * k, "stderr": 0.1 * k}
        for scorer, k in (("gate", 1.0), ("ablation", 0.3))
        for i, (s, layer, h) in enumerate(heads)
    ]
    training = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0], "valid_loss": [2.1, 1.2]})
    training = training.assign(valid_sequence_accuracy=[0.1, 0.9])
    for head in ("encoder_self.0.0", "encoder_self.0.1", "cross.0.0", "cross.0.2"):
        training[f"gate_{head}"] = [1.0, 1.2]
    return {
        "heads": pd.DataFrame(scores),
        "agreement": pd.DataFrame([{"scorer": "gate", "other": "ablation", "spearman": 0.876}]),
        "pruning": pruning_table(),
        "latency": pd.DataFrame([{"scorer": "dense again", "speedup_q1": 0.98, "speedup_q3": 1.02}]),
        "training": training,
    }


def text_of(plot: Plot) -> str:
    """The words in a figure: its SVG keeps text as text."""
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", plot.svg.decode()))


def test_every_figure_is_drawn_labelled_and_says_what_it_shows() -> None:
    plots = {plot.name: plot for plot in draw(all_tables())}
    assert list(plots) == ["accuracy", "heads", "agreement", "latency", "training"]
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


def test_the_heat_map_leaves_removed_heads_empty() -> None:
    """Head 1 of `cross` does not exist; the numbers that do are all there, each in its own cell."""
    heads = next(plot for plot in draw(all_tables()) if plot.name == "heads")
    values = heads.figure.axes[0].images[0].get_array()
    assert values is not None
    np.testing.assert_array_equal(np.isnan(np.ma.filled(values, np.nan)), [[False, False, True], [False, True, False]])


def test_the_same_tables_give_the_same_bytes() -> None:
    for first, second in zip(draw(all_tables()), draw(all_tables()), strict=True):
        assert first.svg == second.svg, first.name
        assert first.png == second.png, first.name


@pytest.mark.parametrize("missing", ["heads", "agreement", "pruning", "latency", "training"])
def test_what_cannot_be_drawn_is_left_out(missing: str) -> None:
    tables = all_tables()
    del tables[missing]
    names = [plot.name for plot in draw(tables)]
    assert 2 <= len(names) < 5


def test_a_single_scorer_and_a_model_without_gates_draw() -> None:
    tables = all_tables()
    for name in ("heads", "pruning"):
        tables[name] = tables[name][tables[name]["scorer"] == "ablation"]
    tables["agreement"] = tables["agreement"].iloc[:0]
    tables["training"] = tables["training"][["step", "loss", "valid_loss", "valid_sequence_accuracy"]]
    assert [plot.name for plot in draw(tables)] == ["accuracy", "heads", "latency", "training"]


def test_figures_and_reports_need_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; import mhaprune.figures, mhaprune.report, mhaprune.collect"
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


def test_heat_maps_are_read_without_colour() -> None:
    """Every colour map in use grows lighter or darker all the way."""
    sources = "".join(path.read_text() for path in (ROOT / "mhaprune").glob("*plots.py"))
    names = set(re.findall(r'(?:cmap="|"cmap": "|colormaps\[")(\w+)"', sources))
    assert len(names) >= 3
    for name in names:
        lightness = matplotlib.colormaps[name](np.linspace(0, 1, 50))[:, :3] @ (0.2126, 0.7152, 0.0722)
        steps = np.diff(lightness)
        assert (steps > 0).all() or (steps < 0).all(), name
