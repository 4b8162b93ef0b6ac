"""The course of training as a figure and as files of TensorBoard."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mhaprune.reporting.plots import Plot, draw
from mhaprune.reporting.training import MOST_NAMED, event_files, training_curve
from mhaprune.runs.run import build
from mhaprune.settings.options import ConfigError
from mhaprune.storage.store import RunFolder
from support.composing import compose
from support.made_tables import all_tables, text_of
from support.sizes import TINY, TINY_SEQUENCES


def drawn(training: pd.DataFrame) -> Plot:
    (plot,) = draw((training_curve,), {"training": training})
    return plot


def gated(heads: int) -> pd.DataFrame:
    progress = {"step": [0, 25], "loss": [np.nan, 1.0], "valid_loss": [2.1, 1.2], "valid_quality": [0.5, 0.5]}
    return pd.DataFrame(progress | {f"gate_cross.0.{i}": [1.0, 0.5] for i in range(heads)})


def test_loss_and_accuracy_have_a_panel_each() -> None:
    loss, quality, *gates = drawn(all_tables()["training"]).figure.axes
    assert [axes.get_ylabel() for axes in (loss, quality)] == ["loss (nats per token)", "exact match"]
    assert (len(loss.get_lines()), len(quality.get_lines())) == (2, 1)
    assert len(gates) == 2


@pytest.mark.parametrize("heads", [0, 1, 4])
def test_no_legend_covers_a_line(heads: int) -> None:
    figure = drawn(gated(heads)).figure
    figure.draw_without_rendering()
    legends = [legend for part in (figure, *figure.subfigs) for legend in part.legends]
    legends += [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None]
    assert len(legends) == 2 + bool(heads)
    for legend in legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_more_gates_than_can_be_told_apart_have_no_legend() -> None:
    assert f"head {MOST_NAMED - 1}" in text_of(drawn(gated(MOST_NAMED)))
    assert "head 0" not in text_of(drawn(gated(768)))


def test_a_single_evaluation_is_a_point() -> None:
    loss, _ = drawn(gated(0)).figure.axes
    assert [line.get_marker() for line in loss.get_lines()] == ["o", ""]


needs_tensorboard = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="is not installed")


@needs_tensorboard
@pytest.mark.slow  # the import takes seconds
@pytest.mark.filterwarnings("ignore")
def test_every_number_of_the_history_is_in_the_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = pd.DataFrame({"step": [0, 50], "loss": [None, 0.5], "gate_cross.0.1": [1.0, 0.25], "task": "sort"})
    for name, content in event_files(history).items():
        assert Path(name).parent.name == "tensorboard"
        (tmp_path / Path(name).name).write_bytes(content)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    values = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert values == {"training/loss": [(50, 0.5)], "gate/cross.0.1": [(0, 1.0), (50, 0.25)]}


@needs_tensorboard
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_leaves_them_only_where_wanted_and_is_the_same_run(tmp_path: Path) -> None:
    settings = [*TINY, *TINY_SEQUENCES, "experiment=train", f"cache={tmp_path}/cache"]
    plain, drawn = build(compose(*settings)), build(compose(*settings, "tensorboard=true"))
    assert plain.identity == drawn.identity
    for run, expected in ((plain, 0), (drawn, 1)):
        with RunFolder(tmp_path / f"run{expected}").recorded() as folder:
            run(folder)
        assert len([name for name in folder.files if name.startswith("tensorboard/")]) == expected


def test_what_cannot_be_shown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="^tensorboard=true: shows training, and a pretrained model"):
        build(compose("model=minilm", "tensorboard=true"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tensorboard=true: is not installed: pip install -e '\.\[tensorboard\]'$"):
        build(compose("tensorboard=true"))
