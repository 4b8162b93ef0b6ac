from __future__ import annotations

import math

import pytest
import torch

from mhaprune.experiments.anatomy.study import scaling_table, softmax_gradient, with_and_without
from mhaprune.experiments.anatomy.words import _scaling
from mhaprune.reporting.plots import short


def test_the_gradient_is_the_norm_of_the_jacobian() -> None:
    scores = torch.randn(6, dtype=torch.double)
    jacobian = torch.autograd.functional.jacobian(lambda x: x.softmax(dim=0), scores)
    torch.testing.assert_close(softmax_gradient(scores.softmax(dim=0)), jacobian.norm())  # type: ignore[union-attr]
    assert softmax_gradient(torch.tensor([1.0, 0.0, 0.0])) == 0


def test_scores_spread_by_the_root_of_the_size_unless_they_are_divided_by_it() -> None:
    table = scaling_table([4, 64, 256]).set_index(["head_dim", "scaled"])
    for head_dim in (4, 64, 256):
        assert table.loc[(head_dim, True), "score_std"] == pytest.approx(1, abs=0.1)
        assert table.loc[(head_dim, False), "score_std"] == pytest.approx(math.sqrt(head_dim), rel=0.1)
    assert table.loc[(256, False), "gradient"] < 0.1 * table.loc[(256, True), "gradient"]
    assert table.loc[(256, False), "entropy"] < 0.1 < table.loc[(256, True), "entropy"] < math.log(10)
    assert (table["entropy_q1"] <= table["entropy"]).all()
    assert (table["entropy"] <= table["entropy_q3"]).all()
    skewed = table.loc[(256, False)]
    assert skewed["entropy_mean"] > 5 * skewed["entropy"], "so a median alone would say little"
    rows = scaling_table([256]).set_index(["head_dim", "scaled"])
    line = _scaling(rows.reset_index())
    for column in ("entropy_mean", "entropy_q1", "entropy_q3", "gradient_mean", "gradient_q3"):
        for scaled in (True, False):
            assert short(rows.loc[(256, scaled), column]) in line


def test_one_query_with_and_without() -> None:
    query, keys = torch.tensor([2.0, 0.0, 0.0, 0.0]), torch.eye(4)
    table = with_and_without(query, keys, torch.tensor([True, False, True, True])).set_index("key")
    assert list(table.index) == [0, 2, 3]
    assert table.loc[0, "score_unscaled"] == 2
    assert table.loc[0, "score"] == 1
    assert table["weight"].sum() == pytest.approx(1)
    assert table.loc[0, "weight"] == pytest.approx(math.e / (math.e + 2))
    assert table.loc[0, "weight_unscaled"] == pytest.approx(math.e**2 / (math.e**2 + 2))
