from __future__ import annotations

import pytest
import torch

from mhaprune.schedules.base import heads_to_remove
from mhaprune.schedules.one_shot import OneShot
from mhaprune.transformer import Seq2Seq


def test_one_shot_removes_the_lowest_and_of_equals_the_first(model: Seq2Seq) -> None:
    scores = torch.arange(len(model.grid)).flip(0).double()
    scores[3] = scores[5] = -1.0
    none, two, three = OneShot()(model, lambda subject: scores, [0, 2, 3])
    assert none.removed == frozenset()
    assert two.removed == {model.grid.heads[3], model.grid.heads[5]}
    assert three.removed == two.removed | {model.grid.heads[-1]}


def test_budgets_are_met_exactly(model: Seq2Seq) -> None:
    budgets = list(range(len(model.grid) + 1))
    masks = OneShot()(model, lambda subject: torch.zeros(len(subject.grid)), budgets)
    assert [len(mask.removed) for mask in masks] == budgets


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
    ],
)
def test_budgets_that_cannot_be_are_refused(budget: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        heads_to_remove([budget], 6)
