"""Budgets in every unit: met exactly, or refused with what can be met."""

from __future__ import annotations

import pytest

from mhaprune.budgets import heads_to_remove


def test_budgets_are_fractions_or_heads() -> None:
    assert heads_to_remove([0.25, 0.5, 1.0], 24) == [0, 6, 12, 24]
    assert heads_to_remove([1, 3, 0.5], 6) == [0, 1, 3]
    assert heads_to_remove([0.125], 6) == [0, 1]
    assert heads_to_remove([], 6) == [0]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (1.5, "budgets=1.5: a fraction must be from 0.0 to 1.0"),
        (-1, "budgets=-1: .* a number of heads 0 or more"),
        (7, "budgets=7: the model has 6 heads, allowed are 0 to 6"),
        (5, "budgets=5: with schedule.keep_at_least heads left in every block only 4 of 6 may go, allowed"),
    ],
)
def test_budgets_that_cannot_be_are_refused(budget: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        heads_to_remove([budget], 6, most=4 if budget == 5 else 6)
