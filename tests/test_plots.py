from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mhaprune.plots import Plot, Tables, draw, draw_comparison


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


def comparison_tables() -> Tables:
    labels = ("num_heads=2", "num_heads=4")
    pruning = pd.concat([pruning_table(i).assign(label=label) for i, label in enumerate(labels)])
    summary = pd.DataFrame(
        {
            "label": label,
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
    plots = {plot.name: plot for plot in draw_comparison(comparison_tables())}
    assert list(plots) == ["comparison", "runs"]
    for plot in plots.values():
        assert "num_heads=2" in text_of(plot)
        assert "num_heads=4" in text_of(plot)


def test_figures_and_reports_need_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; import mhaprune.plots, mhaprune.report, mhaprune.collect"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_run_keeps_its_colour_and_its_place_in_the_legend_in_every_panel() -> None:
    """Also where the first panel's scorer was not run everywhere."""
    tables = dict(comparison_tables())
    pruning = tables["pruning"]
    tables["pruning"] = pruning[~((pruning["label"] == "num_heads=2") & (pruning["scorer"] == "gate"))]
    figure = next(plot for plot in draw_comparison(tables) if plot.name == "comparison").figure
    colours = {(line.get_label(), line.get_color()) for axes in figure.axes for line in axes.get_lines()}
    assert len(colours) == 2
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"num_heads=2", "num_heads=4"}
