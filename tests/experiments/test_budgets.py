"""Budgets: fractions or numbers of heads, refused if the model has not so many."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from mhaprune.lab.experiments.budgets import check_budgets, heads_to_remove


@pytest.mark.parametrize(
    ("budgets", "heads"),
    [
        ([0.1, 0.25, 0.5, 1.0], [0, 2, 6, 12, 24]),
        ([1, 3, 0.125], [0, 1, 3]),
        ([], [0]),
        ([np.float32(0.5), np.int64(3)], [0, 3, 12]),
    ],
)
def test_budgets_are_fractions_or_heads(budgets: list[float], heads: list[int]) -> None:
    assert heads_to_remove(budgets, 24) == heads


OF_SIX = partial(heads_to_remove, num_heads=6)


@pytest.mark.parametrize(
    ("check", "budget", "message"),
    [
        (check_budgets, 1.5, "budgets=1.5: a fraction must be from 0.0 to 1.0"),
        (check_budgets, -1, "budgets=-1: .* a number of heads 0 or more"),
        (OF_SIX, 7, "budgets=7: the model has 6 heads, allowed are 0 to 6"),
        (partial(OF_SIX, most=4), 5, "budgets=5: with the schedule's keep_at_least heads left .* only 4 of 6 may go"),
    ],
)
def test_budgets_that_cannot_be_are_refused(check: Any, budget: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check([budget])
