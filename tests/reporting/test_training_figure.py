"""The figure of training: loss, accuracy, and gates where there are any."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from made_tables import all_tables, text_of
from mhaprune.reporting.plots import Plot, draw
from mhaprune.reporting.training import MOST_NAMED, training_curve


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
