"""Exchanges of heads go on until none helps, within what must be kept."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.pruning.plans import Search
from mhaprune.schedules.base import Evidence
from mhaprune.schedules.greedy import Greedy
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.scoring import Scoring
from mhaprune_literature.swap import Swap
from support.models import evidence_of, judged, loss_of


@pytest.mark.slow
def test_swap_ends_where_no_exchange_helps(model: Seq2Seq, splits: Splits) -> None:
    judge = evidence_of(model, splits)
    bad = judged(model, -judge.score(model))
    (start,) = OneShot()(bad, [3])
    (end,) = Swap(OneShot())(Evidence(model, bad.score, judge.loss), [3])
    best = loss_of(model, splits, end)
    assert len(end.removed) == 3
    assert best < loss_of(model, splits, start)
    for back in end.removed:
        for gone in end.kept:
            exchanged = HeadMask(model.grid, end.removed - {back} | {gone})
            assert loss_of(model, splits, exchanged) >= best


def test_an_exchange_leaves_every_block_what_it_must_keep(model: Seq2Seq) -> None:
    """Also where the loss would have a block emptied."""
    first = model.grid.blocks[0]

    def loss(masks: Sequence[HeadMask]) -> Tensor:
        return torch.tensor([-float(sum(head.block == first for head in mask.removed)) for mask in masks])

    judge = Evidence(model, judged(model, -torch.arange(len(model.grid)).double()).score, loss)
    for keep, gone in ((0, 3), (1, 2)):
        (mask,) = Swap(OneShot(keep_at_least=keep))(judge, [6])
        assert sum(head.block == first for head in mask.removed) == gone


def test_per_block_heads_are_exchanged_within_their_block(model: Seq2Seq) -> None:
    """The schedule takes the first head of every block, and the loss would have the last one of it removed."""
    firsts, lasts = ({model.grid.heads[model.grid.positions(block)[n]] for block in model.grid.blocks} for n in (0, -1))
    scores = torch.tensor([float(head not in firsts) for head in model.grid])

    def loss(masks: Sequence[HeadMask]) -> Tensor:
        return torch.tensor([-float(len(mask.removed & lasts)) for mask in masks])

    judge = Evidence(model, judged(model, scores).score, loss)
    (mask,) = Swap(OneShot(scope="per_block"))(judge, [len(firsts)])
    assert mask.removed == lasts


def test_the_start_and_every_exchange_cost_a_pass(model: Seq2Seq, splits: Splits) -> None:
    """The score of the dense model is not the search's."""
    search, grid = Search(Scoring(model, splits.score, 0), "ablation", Ablation()), model.grid
    (start,) = OneShot()(evidence_of(model, splits), [2])
    (end,) = search(Swap(OneShot()), [2])
    rounds, rest = divmod(search.cost["forward_passes"] - 1, 2 * (len(grid) - 2))
    assert rest == 0
    assert rounds >= 1 + len(end.removed - start.removed)
    assert search.cost["backward_passes"] == 0
    after = Search(Scoring(model, splits.score, 0))
    after(Swap(Greedy()), [2])
    assert after.cost["forward_passes"] >= len(grid) + len(grid) - 1 + 1 + 2 * (len(grid) - 2)
