"""Schedules that solve a problem, against all sets that there are and against their formulas."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import Block, HeadGrid, HeadId, HeadMask, Site
from mhaprune.measure.outcomes import gate_gradients
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.pruning.costs import counted
from mhaprune.schedules.base import Evidence
from mhaprune.schedules.budgets import Budget, Cost, removing
from mhaprune.schedules.knapsack import Knapsack
from mhaprune.schedules.one_shot import OneShot
from mhaprune.schedules.rearrangement import Rearrangement
from mhaprune.scorers.fisher import Fisher
from mhaprune.tasks.sort import Sort
from support.models import judged

BLOCKS = [Block(Site.ENCODER_SELF, 0), Block(Site.DECODER_SELF, 0), Block(Site.CROSS, 0)]
GRID = HeadGrid.full(BLOCKS, 3).without([HeadId(Site.CROSS, 0, 1)])
ALL = [HeadMask(GRID, frozenset(gone)) for count in range(len(GRID) + 1) for gone in combinations(GRID, count)]


def subject_of(grid: HeadGrid) -> Any:
    return SimpleNamespace(grid=grid)


def kept_worth(mask: HeadMask, scores: Tensor) -> float:
    return sum(float(scores[mask.grid.index(head)]) for head in mask.kept)


def some_cost(draw: torch.Generator) -> Cost:
    """Of blocks and heads that cost something of their own, one of the three blocks nothing."""
    own, head = torch.rand(2, 3, generator=draw).double().tolist()
    return Cost("ms", 0.5, dict(zip(BLOCKS, [0.0, *own[1:]], strict=True)), dict(zip(BLOCKS, head, strict=True)))


@pytest.mark.parametrize("keep_at_least", [0, 1])
def test_no_set_of_heads_within_the_budget_is_worth_more(keep_at_least: int) -> None:
    """Of all 2^N, also where scores are below zero."""
    draw, differ, cheaper = torch.Generator().manual_seed(0), 0, 0
    for _ in range(25):
        scores, cost = torch.randn(len(GRID), generator=draw).double() + 0.5, some_cost(draw)
        smallest, dense = cost(Knapsack(keep_at_least).smallest(GRID)), cost(HeadMask(GRID))
        limit = smallest + float(torch.rand(1, generator=draw)) * (dense - smallest)
        budget = Budget("some", limit, cost)
        (mask,) = Knapsack(keep_at_least)(judged(subject_of(GRID), scores), [budget])
        must = set(BLOCKS[: 3 * keep_at_least])
        allowed = [one for one in ALL if budget.met_by(one) and must <= {head.block for head in one.kept}]
        best = max(allowed, key=lambda one: kept_worth(one, scores))
        assert mask in allowed
        assert kept_worth(mask, scores) == pytest.approx(kept_worth(best, scores), abs=1e-12)
        (other,) = OneShot(keep_at_least=keep_at_least)(judged(subject_of(GRID), scores), [budget])
        differ += kept_worth(other, scores) < kept_worth(mask, scores) - 1e-9
        negative = [head for head in mask.removed if scores[GRID.index(head)] < 0]
        cheaper += any(budget.met_by(HeadMask(GRID, mask.removed - {head})) for head in negative)
    assert differ >= 5, "one_shot must be told apart"
    assert cheaper >= 3, "heads of negative score must go where they could stay"


@pytest.mark.parametrize("lowest", [0.0, -0.7, -5.0])
def test_with_a_budget_in_heads_it_is_one_shot(model: Seq2Seq, lowest: float) -> None:
    """As many heads go as the budget says, also where their scores are below zero."""
    scores = torch.rand(len(model.grid), generator=torch.Generator().manual_seed(1)).double() + lowest
    for keep in (0, 1):
        most = len(Knapsack(keep).smallest(model.grid).removed)
        budgets, judge = removing(range(most + 1), model.grid), judged(model, scores)
        assert Knapsack(keep)(judge, budgets) == OneShot(keep_at_least=keep)(judge, budgets)


def test_a_block_goes_whole_where_it_costs_more_than_its_heads() -> None:
    cost = Cost("ms", 1.0, dict(zip(BLOCKS, [0.0, 10.0, 0.0], strict=True)), dict.fromkeys(BLOCKS, 1.0))
    scores = torch.tensor([1.0, 1.1, 1.2, 2.0, 2.1, 2.2, 0.5, 0.6]).double()
    dense, without, one_left = (
        Knapsack()(judged(subject_of(GRID), scores), [Budget("some", limit, cost)])[0] for limit in (19.0, 18.0, 6.5)
    )
    assert not dense.removed
    assert [str(head) for head in without.removed] == ["cross.0.0"]
    assert {head.block for head in one_left.removed} == {BLOCKS[1]}
    assert len(one_left.kept) == 5


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_a_budget_in_parameters_is_met_by_the_model_without_the_heads(model: Seq2Seq, share: float) -> None:
    cost = counted("parameters", model, lambda left: left.count_parameters())
    whole, bare = cost(HeadMask(model.grid)), cost(HeadMask(model.grid, frozenset(model.grid)))
    budget = Budget("some", bare + share * (whole - bare), cost)
    scores = torch.rand(len(model.grid), generator=torch.Generator().manual_seed(2)).double()
    (mask,), (other,) = (one(judged(model, scores), [budget]) for one in (Knapsack(), OneShot()))
    assert model.without(mask).count_parameters() <= budget.limit
    assert kept_worth(mask, scores) >= kept_worth(other, scores)


def test_what_no_choice_can_meet_is_refused() -> None:
    cost = Cost("ms", 0.5, dict.fromkeys(BLOCKS, 1.0), dict.fromkeys(BLOCKS, 1.0))
    with pytest.raises(ValueError, match="budgets=2 ms: cannot be met, 3 heads must stay"):
        Knapsack(1)(judged(subject_of(GRID), torch.ones(len(GRID))), [Budget("2 ms", 2.0, cost)])
    with pytest.raises(ValueError, match="keep_at_least=-1: must be 0 or more"):
        Knapsack(-1)


def shown(model: Seq2Seq, gradients_EN: Tensor) -> Evidence:
    return replace(judged(model, torch.zeros(len(model.grid))), gradients=lambda: gradients_EN)


def rise(removed: Iterable[HeadId], model: Seq2Seq, gradients_EN: Tensor) -> float:
    """(1 − m)ᵀ F (1 − m), by the mean over examples of the squared sum."""
    return float(gradients_EN[:, [model.grid.index(head) for head in removed]].sum(dim=1).square().mean())


def test_without_correlation_it_is_one_shot_by_fisher(model: Seq2Seq, splits: Splits) -> None:
    worths_N = Fisher()(model, splits.score, 0).values[0]
    budgets = removing(range(19), model.grid)
    gradients_EN = torch.diag(worths_N.sqrt())
    assert Rearrangement()(shown(model, gradients_EN), budgets) == OneShot()(judged(model, worths_N), budgets)


def test_two_heads_that_pull_alike_do_not_go_together(model: Seq2Seq) -> None:
    """In the first block heads 0 and 1 pull alike and head 2 pulls more but against them; no other head is cheap."""
    examples = 40
    gradients_EN = torch.full((examples, len(model.grid)), 9.0).double()
    pull_E = torch.randn(examples, generator=torch.Generator().manual_seed(0)).double()
    gradients_EN[:, :3] = pull_E[:, None] * torch.tensor([1.0, 1.1, -1.2]).double()
    one, two, three = Rearrangement()(shown(model, gradients_EN), removing([1, 2, 3], model.grid))
    heads = model.grid.heads
    assert one.removed == {heads[0]}
    assert two.removed == {heads[1], heads[2]}  # the sums of the pulls are 2.1, -0.2 and -0.1
    assert three.removed == set(heads[:3])


def test_it_goes_on_until_no_exchange_helps(task: Sort) -> None:
    """Two pairs of heads pull alike, each in a direction of its own, and each has a third that pulls against it."""
    sizes = {"d_model": 12, "num_heads": 6, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 8}
    model = Seq2Seq(Transformer(**sizes), len(task.vocabulary), None)
    gradients_EN = torch.full((2, len(model.grid)), 9.0).double()
    gradients_EN[0, :6] = torch.tensor([1.0, 1.01, 0, 0, -1.1, 0])
    gradients_EN[1, :6] = torch.tensor([0, 0, 1.0, 1.01, 0, -1.1])
    (mask,) = Rearrangement()(shown(model, gradients_EN), removing([4], model.grid))
    assert mask.removed == {model.grid.heads[n] for n in (1, 3, 4, 5)}


def test_no_exchange_within_a_block_is_left_that_helps(model: Seq2Seq, splits: Splits) -> None:
    """On the gradients of a model; every block keeps as many heads as by the diagonal."""
    gradients_EN = gate_gradients(model, splits.score)
    budgets = removing(range(len(model.grid) + 1), model.grid)
    scores_N = Fisher()(model, splits.score, 0).values[0]
    starts = OneShot()(judged(model, scores_N), budgets)
    ends = Rearrangement()(shown(model, gradients_EN), budgets)
    assert starts != ends, "the fixture must tell right from wrong"
    for start, end in zip(starts, ends, strict=True):
        for block in model.grid.blocks:
            before, after = ({head for head in mask.removed if head.block == block} for mask in (start, end))
            assert len(before) == len(after)
            lowest = rise(after, model, gradients_EN)
            assert lowest <= rise(before, model, gradients_EN) + 1e-12
            kept = [head for head in model.grid if head.block == block and head not in after]
            for back in after:
                for gone in kept:
                    assert rise(after - {back} | {gone}, model, gradients_EN) >= lowest - 1e-12
