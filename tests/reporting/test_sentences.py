from __future__ import annotations

import pandas as pd
import pytest

from mhaprune.heads import HeadId
from mhaprune.reporting.sentences import if_poor
from mhaprune.tables import by_block


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
