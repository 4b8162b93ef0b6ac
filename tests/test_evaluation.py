from __future__ import annotations

import math

import pandas as pd

from mhaprune.data import PAD
from mhaprune.evaluation import nothing_learnt
from mhaprune.tasks.base import Splits
from mhaprune.training.loop import Training


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
