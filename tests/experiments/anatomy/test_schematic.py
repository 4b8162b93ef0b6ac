"""The picture of the whole layer shows the numbers of the call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mhaprune.attention.gates import Softmax
from mhaprune.attention.layer import MultiHeadAttention, padding_bias, padding_mask
from mhaprune.experiments.anatomy.figures import MOST_HEADS, schematic
from mhaprune.experiments.anatomy.walkthrough import LayerCall, heads_here_table, steps_table, values_table, walk
from mhaprune.reporting.plots import Plot, draw
from mhaprune.tables import Tables
from support.legible import check_legible


def tables_of(heads: int, queries: int = 5, keys: int = 7) -> Tables:
    torch.manual_seed(heads)
    layer = MultiHeadAttention(4 * heads, heads, gate=Softmax(init="rand"))
    inputs = [torch.randn(2, length, 4 * heads) for length in (queries, keys, keys)]
    bias = padding_bias(padding_mask(torch.tensor([keys - 2, keys]), keys), torch.float)
    steps = walk(LayerCall(layer, *inputs, bias))
    return {
        "tensors": steps_table("cross.0", steps),
        "values": values_table(steps, 0).assign(site="cross", layer=0, head=0, place=0),
        "heads_here": heads_here_table(steps, [10 + n for n in range(heads)]),
    }


def drawn(tables: Tables) -> Plot:
    (plot,) = draw((schematic,), tables)
    return plot


def shown(plot: Plot) -> list[np.ndarray]:
    images = [axes.images[0].get_array() for axes in plot.figure.axes if axes.images]
    return [np.ma.filled(np.ma.asarray(image, float), np.nan) for image in images]


@pytest.mark.parametrize("heads", [1, 4])
def test_every_head_has_its_part_of_the_wide_tensors(heads: int) -> None:
    tables = tables_of(heads)
    plot = drawn(tables)
    check_legible(plot)
    queries, keys, values, merged, _, *rows = shown(plot)
    assert len(rows) == 3 * heads
    for n in range(heads):
        split, weights, result = rows[3 * n : 3 * n + 3]
        part = slice(4 * n, 4 * n + 4)
        np.testing.assert_array_equal(split[:5, :4], queries[:, part])
        np.testing.assert_array_equal(split[:, 5:9], keys[:, part])
        np.testing.assert_array_equal(split[:, 10:], values[:, part])
        np.testing.assert_array_equal(result, merged[:, part])
        own = tables["heads_here"].query("place == @n")
        assert np.isnan(weights[:, -2:]).all(), "padding"
        np.testing.assert_allclose(np.nansum(weights, axis=1), 1, atol=1e-5)
        np.testing.assert_allclose(weights[:, :-2] @ values[:-2, part] * own["gate_value"].iloc[0], result, atol=1e-5)
    words = [text.get_text() for axes in plot.figure.axes for text in axes.texts]
    assert words == [f"× {gate:.2f}" for gate in tables["heads_here"].groupby("place")["gate_value"].first()]
    assert "head 10" in [axes.get_ylabel() for axes in plot.figure.axes]


def test_more_heads_than_fit_are_counted() -> None:
    plot = drawn(tables_of(MOST_HEADS + 2))
    check_legible(plot)
    assert len(shown(plot)) == 5 + 3 * MOST_HEADS
    assert f"{MOST_HEADS} of {MOST_HEADS + 2} heads" in plot.caption
