"""The rearrangement against its formula, on made gradients and on those of a tiny model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import HeadId
from mhaprune.measure.outcomes import gate_gradients
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.schedules.base import Evidence
from mhaprune.schedules.budgets import removing
from mhaprune.schedules.one_shot import OneShot
from mhaprune.schedules.rearrangement import Rearrangement
from mhaprune.scorers.fisher import Fisher
from mhaprune.tasks.sort import Sort
from support.models import judged


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
