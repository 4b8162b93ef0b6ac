from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from mhaprune.data import PAD, Splits
from mhaprune.measure.columns import accuracy_columns, choose_columns
from mhaprune.model.training import Training
from mhaprune.statistics.intervals import mean_interval, paired_interval, share_interval, wilson_interval
from mhaprune.studies.trained import nothing_learnt
from mhaprune.wrapping.losses import LossAndQuality


def test_a_training_that_taught_nothing_is_named(splits: Splits) -> None:
    """A model that knows how often each symbol is, and nothing else, has a loss of their entropy."""
    history = pd.DataFrame({"valid_loss": [3.0, 0.0], "valid_quality": [0.1, 0.0]})
    tokens = splits.valid.target[splits.valid.target != PAD].tolist()
    entropy = -sum(math.log(tokens.count(token) / len(tokens)) for token in tokens) / len(tokens)
    for loss, named in ((entropy - 1e-6, False), (entropy + 1e-6, True), (math.inf, True)):
        history.loc[1, "valid_loss"] = loss
        line = nothing_learnt(Training(learning_rate=5.0, weight_decay=0.1), history, splits.valid)
        assert (line is not None) == named
    assert line is not None
    assert line.startswith("training.learning_rate=5.0, steps=600: nothing was learnt.")
    assert "exact match reached 0.100" in line


def judged(quality_E: np.ndarray) -> LossAndQuality:
    return LossAndQuality(torch.ones(len(quality_E)), torch.from_numpy(quality_E))


@pytest.mark.parametrize(("binary", "interval"), [(True, wilson_interval), (False, share_interval)])
def test_answers_and_shares_have_intervals_of_their_own(binary: bool, interval: object) -> None:
    quality_E = np.random.default_rng(0).random(40)
    quality_E = (quality_E < 0.9).astype(float) if binary else quality_E
    columns = accuracy_columns(judged(quality_E))
    assert callable(interval)
    assert (columns["quality_low"], columns["quality_high"]) == interval(quality_E)


def test_the_loss_of_pairs_has_the_interval_of_its_kind() -> None:
    draw = np.random.default_rng(0)
    dense_E, left_E = draw.random((2, 40))
    columns = choose_columns(judged(left_E), judged(dense_E))
    assert (columns["choose_drop_low"], columns["choose_drop_high"]) == mean_interval(dense_E - left_E)
    dense_E, left_E = (dense_E < 0.9).astype(float), (left_E < 0.8).astype(float)
    columns = choose_columns(judged(left_E), judged(dense_E))
    assert (columns["choose_drop_low"], columns["choose_drop_high"]) == paired_interval(dense_E, left_E)
