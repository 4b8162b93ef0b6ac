"""Budgets in every unit: met by the fewest heads removed, or refused with what can be met."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.pruning import costs as module
from mhaprune.pruning.costs import Costs, counted
from mhaprune.schedules.base import Evidence
from mhaprune.schedules.budgets import Budget, Cost, check_budgets, heads_to_remove, removing, resolve
from mhaprune.schedules.greedy import Greedy
from mhaprune.schedules.one_shot import OneShot
from mhaprune.schedules.swap import Swap
from mhaprune.tasks.sort import Sort
from support.models import judged


@pytest.mark.parametrize(
    ("budgets", "heads"),
    [([0.1, 0.25, 0.5, 1.0], [0, 2, 6, 12, 24]), ([1, 3, 0.125], [0, 1, 3]), ([], [0])],
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


@pytest.mark.parametrize("text", ["ms", "3 seconds", "-1 ms", "1.2.3 ms", "4", "nan ms", ""])
def test_a_text_that_names_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"budgets={text}: a text must be a number and one of heads, parameters, f"):
        check_budgets([text])


def costs(model: Seq2Seq, splits: Splits) -> Costs:
    kept: dict[str, Any] = {}

    def remember(kind: str, what: dict[str, Any], make: Any) -> dict[str, Any]:
        if kind not in kept:
            kept[kind] = make(None, None)
        return kept[kind]

    return Costs(model, splits.report[:4], splits.report[:4], 2, remember)


@settings(max_examples=8, deadline=None)
@given(removed=st.sets(st.integers(0, 17)))
def test_counted_costs_are_those_of_a_model_without_the_heads(removed: set[int]) -> None:
    torch.manual_seed(0)
    task = Sort(train=20, valid=2, score=2, choose=2, report=4, num_symbols=5, max_length=6)
    config = Transformer(d_model=12, num_heads=3, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=16)
    model, batch = Seq2Seq(config, len(task.vocabulary)), task.splits().report
    mask = HeadMask(model.grid, frozenset(model.grid.heads[n] for n in removed))
    smaller = model.without(mask)
    parameters = counted("parameters", model, lambda left: left.count_parameters())
    flops = counted("flops", model, lambda left: left.count_flops(batch))
    assert parameters(mask) == smaller.count_parameters()
    assert flops(mask) == smaller.count_flops(batch)


def test_operations_are_those_of_one_example(model: Seq2Seq, splits: Splits) -> None:
    batch = splits.report[:4]
    assert costs(model, splits)("flops")(HeadMask(model.grid)) == pytest.approx(model.count_flops(batch) / len(batch))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that charges 7 for a model, 2 for a block with heads and 0.5 for each of them, and 3 less without any head:
    nobody reads the encoder then."""

    def timed(calls: dict[str, Any], rounds: int, **device: Any) -> pd.DataFrame:
        sizes = {name: call.func.__self__.grid.sizes for name, call in calls.items()}
        times = {n: 7 + sum(2 + 0.5 * size for size in s if size) - 3 * (not any(s)) for n, s in sizes.items()}
        return pd.DataFrame([times] * rounds)

    monkeypatch.setattr(module, "in_turn", timed)


@pytest.mark.usefixtures("clock")
def test_milliseconds_are_a_sum_over_blocks_and_heads(model: Seq2Seq, splits: Splits) -> None:
    """The blocks save 21 one by one and 24 together, which is shared out."""
    cost, more = costs(model, splits)("ms"), 24 / 21
    assert cost.floor == pytest.approx(4)
    assert cost.block == {block: pytest.approx(2 * more) for block in model.grid.blocks}
    assert cost.head == {block: pytest.approx(0.5 * more) for block in model.grid.blocks}
    assert cost(HeadMask(model.grid)) == pytest.approx(28)
    mask = HeadMask(model.grid, frozenset(model.grid.heads[:4]))  # a block of three and one of the next
    assert cost(mask) == pytest.approx(4 + more * (5 * 2 + 14 * 0.5))


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.55, 0.8])
@pytest.mark.parametrize("unit", ["heads", "parameters", "flops", "ms"])
def test_a_budget_is_met_by_the_fewest_heads(model: Seq2Seq, splits: Splits, unit: str, share: float) -> None:
    """With the last of them back in, it is not met; and no exchange breaks it."""
    scores = torch.rand(len(model.grid)).double()
    worth = dict(zip(model.grid, scores.tolist(), strict=True))

    def loss(masks: Sequence[HeadMask]) -> Tensor:
        return torch.tensor([-sum(worth[head] for head in mask.removed) for mask in masks])

    cost = Cost.heads(model.grid) if unit == "heads" else costs(model, splits)(unit)
    everything, nothing = HeadMask(model.grid), HeadMask(model.grid, frozenset(model.grid))
    limit = cost(nothing) + share * (cost(everything) - cost(nothing))
    budget = Budget("some", limit, cost)
    (mask,) = OneShot()(judged(model, scores), [budget])
    assert cost(mask) <= limit * (1 + 1e-9)
    assert cost(HeadMask(model.grid, mask.removed - {max(mask.removed, key=worth.__getitem__)})) > limit
    (swapped,) = Swap(OneShot())(Evidence(model, lambda left: scores, loss), [budget])
    assert cost(swapped) <= limit * (1 + 1e-9)


def test_resolved_budgets_go_from_large_to_small_and_what_cannot_be_met_is_refused(model: Seq2Seq) -> None:
    grid = model.grid
    smallest = OneShot(keep_at_least=1).smallest(grid)
    parameters = counted("parameters", model, lambda left: left.count_parameters())
    resolved = resolve([0.5, "10 heads", 3, "7 heads"], smallest, lambda unit: parameters)
    assert [budget.name for budget in resolved] == ["0", "3", "8", "9", "11"]
    assert [budget.heads_kept(grid) for budget in resolved] == [18, 15, 10, 9, 7]
    least, dense = parameters(smallest), parameters(HeadMask(grid))
    with pytest.raises(ValueError, match="experiment.budgets=13: with the schedule's .* only 12 of 18"):
        resolve(["5 heads"], smallest, lambda unit: parameters)
    with pytest.raises(ValueError, match=f"costs {least:.6g} parameters, allowed are {least:.6g} to {dense:.6g}"):
        resolve([f"{least - 1} parameters"], smallest, lambda unit: parameters)
    with pytest.raises(ValueError, match="the cost of the whole model"):
        resolve([f"{dense + 1} parameters"], smallest, lambda unit: parameters)
    empty = Greedy().smallest(grid)
    ms = Cost("ms", 2.5, dict.fromkeys(grid.blocks, 0.1), dict.fromkeys(grid.blocks, 0.05))
    with pytest.raises(ValueError, match="budgets=2 ms: a model with no heads costs 2.5 ms, allowed are 2.5 to 4 ms"):
        resolve(["2 ms"], empty, lambda unit: ms)


def test_a_budget_has_room_for_rounding(model: Seq2Seq) -> None:
    """A sum in another order may end a digit higher. The whole model is within a budget of its own cost."""
    grid = model.grid
    ms = Cost("ms", 0.1, dict.fromkeys(grid.blocks, 0.1), dict.fromkeys(grid.blocks, 0.1))
    whole = ms(HeadMask(grid))
    for limit in (whole, whole * (1 - 1e-12), whole * (1 + 1e-12)):
        assert Budget("some", limit, ms).met_by(HeadMask(grid))
        (dense, budget) = resolve([f"{limit!r} ms"], OneShot().smallest(grid), lambda unit: ms)
        assert dense.heads_kept(grid) == budget.heads_kept(grid) == len(grid)
    assert not Budget("some", whole * (1 - 1e-6), ms).met_by(HeadMask(grid))
    with pytest.raises(ValueError, match="the cost of the whole model"):
        resolve([f"{whole * (1 + 1e-6)!r} ms"], OneShot().smallest(grid), lambda unit: ms)


def test_a_scorer_is_told_about_how_many_heads_a_budget_leaves(model: Seq2Seq) -> None:
    for kept in (0, 1, 7, 18):
        (budget,) = removing([18 - kept], model.grid)
        assert budget.heads_kept(model.grid) == kept
    parameters = counted("parameters", model, lambda left: left.count_parameters())
    mask = HeadMask(model.grid, frozenset(model.grid.heads[:5]))
    assert Budget("some", parameters(mask), parameters).heads_kept(model.grid) == 13
    assert Budget("some", parameters(mask) - 1, parameters).heads_kept(model.grid) == 12
    nothing = dict.fromkeys(model.grid.blocks, 0.0)
    assert Budget("4 ms", 4.0, Cost("ms", 5.0, nothing, nothing)).heads_kept(model.grid) == 0, "lost in noise"
