"""Schedules against plain twins on a tiny model."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import BlockId, HeadGrid, HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.measure.outcomes import measure, output_difference
from mhaprune.pruning.plans import Refits, Search
from mhaprune.recoveries.refitting import refit, show
from mhaprune.schedules.base import Evidence, Stepwise
from mhaprune.schedules.greedy import Greedy
from mhaprune.schedules.greedy_refit import GreedyRefit
from mhaprune.schedules.iterative import Iterative
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.scoring import Scoring
from mhaprune.scorers.surgeon import Surgeon
from mhaprune.subject import Subject
from support.models import evidence_of, judged, loss_of
from support.sizes import slow


@pytest.fixture
def judge(model: Seq2Seq, splits: Splits) -> Evidence:
    return evidence_of(model, splits)


def test_one_shot_removes_the_lowest_and_of_equals_the_first(model: Seq2Seq) -> None:
    scores = torch.arange(len(model.grid)).flip(0).double()
    scores[3] = scores[5] = -1.0
    none, two, three = OneShot()(judged(model, scores), [0, 2, 3])
    assert none.removed == frozenset()
    assert two.removed == {model.grid.heads[3], model.grid.heads[5]}
    assert three.removed == two.removed | {model.grid.heads[-1]}


def test_iterative_scores_what_is_left(model: Seq2Seq, splits: Splits, judge: Evidence) -> None:
    for every in (1, 4):
        mask, scored = HeadMask(model.grid), 0
        expected = [mask]
        for step in range(10):
            if step % every == 0:
                left = model.without(mask) if step else model
                ranked = [left.grid.heads[n] for n in Ablation()(left, splits.score, 0).values[0].argsort().tolist()]
                scored += 1
            mask = mask.without(ranked.pop(0))
            expected.append(mask)
        asked: list[int] = []

        def counted(left: Subject, asked: list[int] = asked) -> Tensor:
            asked.append(len(left.grid))
            return judge.score(left)

        assert Iterative(every=every)(Evidence(model, counted, judge.loss), range(11)) == expected
        assert asked == [len(model.grid) - n for n in range(0, 10, every)]
    assert expected[-1] != OneShot()(judge, [10])[0], "the fixture must tell right from wrong"


def test_greedy_removes_what_costs_least_now(model: Seq2Seq, splits: Splits, judge: Evidence) -> None:
    mask = HeadMask(model.grid)
    for chosen in Greedy()(judge, range(1, 6)):
        losses = {head: loss_of(model, splits, mask.without(head)) for head in mask.kept}
        mask = mask.without(min(mask.kept, key=losses.__getitem__))
        assert chosen == mask


@pytest.mark.parametrize(("proposed", "every"), [(2, 2), *slow((1, 9), (1, 1))])
def test_greedy_refit_removes_what_costs_least_after_a_refit(
    model: Seq2Seq, splits: Splits, proposed: int, every: int
) -> None:
    """Against plain loops over the heads that each block can spare best, with the split cut by hand."""
    schedule, score = GreedyRefit(examples=8, proposed=proposed, every=every), splits.score
    fitted, judged = (Examples(score.source[i:8:2], score.target[i:8:2]) for i in (0, 1))
    shown, passes = show(model, fitted), 1

    def refitted(mask: HeadMask) -> Seq2Seq:
        return refit(model.without(mask), shown, 1e-3, feed_forward=False)

    mask, expected = HeadMask(model.grid), list[HeadMask]()
    while len(expected) < 3:
        left = refitted(mask) if mask.removed else model
        errors = dict(zip(left.grid, Surgeon(step=1.0)(left, fitted, 0).values[0].tolist(), strict=True))
        tried = []
        for block in left.grid.blocks:
            tried += sorted((head for head in left.grid if head.block == block), key=errors.__getitem__)[:proposed]
        passes += bool(mask.removed) + 1 + 2 * len(tried)  # a refit, the errors, and a refit and a loss of each
        tried.sort(key=lambda head: float(measure(refitted(mask.without(head)), judged).loss.mean()))
        for head in tried[: min(every, max(1, len(tried) // 2))]:
            mask = mask.without(head)
            expected.append(mask)
    search = Search(Scoring(model, score, 0))
    assert search(schedule, range(1, 4)) == expected[:3]
    assert expected[2] != Search(Scoring(model, score, 0))(Greedy(), [3])[0]
    assert search.cost["forward_passes"] == pytest.approx(passes * 4 / len(score))


def test_refits_read_the_first_examples_and_no_label_for_the_fit(model: Seq2Seq, splits: Splits) -> None:
    score = splits.score
    mask = HeadMask(model.grid, frozenset(model.grid.heads[::3]))
    other = Examples(score.source, score.target.clone())
    other.target[::2] = score.target[::2].flip(0)
    first, same = (Refits(model, examples[:30]).without(mask) for examples in (score, other))
    assert output_difference(first, same, score) == 0
    before = model.without(mask).state_dict()
    changed = {name for name, value in first.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".out_proj." in name for name in changed)
    assert Refits(model, score[:30]).loss(first) == pytest.approx(float(measure(first, score[:30][1::2]).loss.mean()))


@pytest.mark.slow
def test_ablation_after_every_head_is_greedy(judge: Evidence) -> None:
    budgets = range(12)
    assert Iterative()(judge, budgets) == Greedy()(judge, budgets)


def test_blocks_are_compared_with_what_they_were_before_anything_was_removed(model: Seq2Seq) -> None:
    """A block that has given a head is not the next to give one, also when what is left is a model of its own."""
    scores = torch.arange(len(model.grid)).double()
    (first,) = OneShot(scope="per_block")(judged(model, scores), [1])
    left = model.without(first)
    judge = Evidence(left, lambda subject: scores[1:], judged(model, scores).loss, model.grid)
    (second,) = OneShot(scope="per_block")(judge, [1])
    assert {head.block for head in first.removed} != {head.block for head in second.removed}


@pytest.mark.parametrize("schedule", [OneShot(), OneShot(scope="per_block"), Iterative(every=3), Greedy()])
def test_a_budget_of_costs_is_met_by_the_first_mask_that_removes_as_much(
    model: Seq2Seq, splits: Splits, judge: Evidence, schedule: Stepwise
) -> None:
    cost = torch.arange(1.0, len(model.grid) + 1)
    priced = replace(judge, cost=cost)
    path = list(schedule.path(priced))
    removed = [float(cost @ (1 - mask.gates())) for mask in path]
    budgets = [0.0, 0.5, 20.0, removed[7], removed[-1]]
    first = [next(mask for mask, gone in zip(path, removed, strict=True) if gone >= budget) for budget in budgets]
    assert schedule(priced, budgets) == first
    with pytest.raises(ValueError, match=f"budgets={removed[-1] + 1:g}: cannot be met, 0 heads must stay"):
        schedule(priced, [removed[-1] + 1])


def test_of_equal_scores_the_dearest_goes_first(model: Seq2Seq) -> None:
    scores, cost = torch.ones(len(model.grid)), torch.ones(len(model.grid))
    cost[4], scores[7] = 2.0, 0.6
    (mask,) = OneShot()(replace(judged(model, scores), cost=cost), [2.5])
    assert mask.removed == {model.grid.heads[4], model.grid.heads[7]}


@pytest.mark.parametrize("scope", ["global", "per_block"])
def test_thousands_of_units_make_no_mask_that_nobody_asked_for(scope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask for every step would be quadratic: 4,096 units took eight seconds."""
    grid = HeadGrid.full([BlockId("ffn", layer) for layer in range(4)], 1024)
    scores = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    made, plain = list[int](), HeadMask.__post_init__
    monkeypatch.setattr(HeadMask, "__post_init__", lambda mask: (made.append(len(mask.removed)), plain(mask)))
    schedule = OneShot(scope=scope, keep_at_least=100)
    masks = schedule(Evidence(SimpleNamespace(grid=grid), lambda left: scores, print), [1000, 3000])  # type: ignore[arg-type]
    assert len(made) < 10
    for mask, count in zip(masks, (1000, 3000), strict=True):
        by_block = scores.view(4, 1024)
        if scope == "per_block":
            weakest = by_block.argsort(dim=1)[:, : count // 4] + 1024 * torch.arange(4)[:, None]
            assert mask.removed == {grid.heads[n] for n in weakest.flatten().tolist()}
        else:
            allowed = scores.clone()  # the best 100 of a block stay
            allowed[(by_block.argsort(dim=1)[:, -100:] + 1024 * torch.arange(4)[:, None]).flatten()] = torch.inf
            assert mask.removed == {grid.heads[n] for n in allowed.argsort()[:count].tolist()}
