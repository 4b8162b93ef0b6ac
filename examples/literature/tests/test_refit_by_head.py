"""One factor for each head: against torch.linalg.lstsq, and in a model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.recoveries.refitting import show
from mhaprune.subject import LastMap
from mhaprune_literature.refit_by_head import RefitByHead, scale_heads
from support.models import study_with

TOKENS, HEADS, K, D = 40, 3, 4, 5


@pytest.fixture
def study(model: Seq2Seq, splits: Splits) -> Study:
    return study_with(model, splits)


def random(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def map_and_parts(factors: Tensor) -> tuple[LastMap, list[tuple[Tensor, Tensor]]]:
    """A map, in two batches, whose output lacks what other factors and some noise would add."""
    weight, heads = random(D, HEADS * K), torch.arange(HEADS * K).reshape(HEADS, K)
    parts = []
    for seed in (1, 2):
        read = random(TOKENS, HEADS * K, seed=seed)
        lacking = read @ (weight * (factors - 1).repeat_interleave(K)).T + 0.1 * random(TOKENS, D, seed=seed + 9) + 0.3
        parts.append((read, lacking))
    return LastMap("out", heads, weight, None, []), parts


@pytest.mark.parametrize("ridge", [0.0, 0.05])
def test_the_factors_are_least_squares_with_a_constant(ridge: float) -> None:
    """With a row for every factor that the ridge holds near 1."""
    last, parts = map_and_parts(torch.tensor([1.5, 1.0, -0.5]).double())
    read, lacking = (torch.cat(each) for each in zip(*parts, strict=True))
    old = last.weight.clone()
    outputs = torch.stack([(read[:, h] @ old[:, h].T).flatten() for h in torch.arange(HEADS * K).split(K)], dim=1)
    rows = torch.eye(HEADS + 1).double()[:-1] * (ridge * outputs.square().sum() / HEADS).sqrt()
    inputs = torch.cat([torch.cat([outputs, torch.ones(len(outputs), 1).double()], dim=1), rows])
    wanted = torch.cat([lacking.flatten(), torch.zeros(HEADS).double()])
    factors = 1 + torch.linalg.lstsq(inputs, wanted[:, None]).solution[:-1, 0]
    scale_heads(last, parts, ridge)
    torch.testing.assert_close(last.weight, old * factors.repeat_interleave(K))


@pytest.mark.parametrize(("factor", "taken"), [(9.0, True), (12.0, False)])
def test_factors_that_are_too_large_are_not_taken(factor: float, taken: bool) -> None:
    last, parts = map_and_parts(torch.tensor([1.0, factor, 1.0]).double())
    before = last.weight.clone()
    scale_heads(last, parts, 0.0)
    assert torch.equal(last.weight, before) != taken


@torch.no_grad()
def test_only_the_heads_that_are_left_are_scaled_and_the_stream_is_nearer(study: Study) -> None:
    """Also where a block has lost all its heads."""
    dense: Any = study.subject
    gone = [head for head in dense.grid if head.layer or not head.head]
    left: Seq2Seq = dense.without(HeadMask(dense.grid).without(*gone))
    new, history = RefitByHead(ridge=1e-6)(study, left, 0, None, lambda state: None)
    assert history.empty
    batches, streams, _ = show(dense, study.splits.train)
    changed, far, near = 0, 0.0, 0.0
    for old, mine, wanted in zip(left.last_maps(batches), new.last_maps(batches), streams, strict=True):
        if old.heads is None or not len(old.heads):
            assert torch.equal(mine.weight, old.weight)
            continue
        ratio = (mine.weight / old.weight)[:, mine.heads]
        torch.testing.assert_close(ratio, ratio[:1, :, :1].expand_as(ratio), msg="one factor for each head")
        if not changed:  # later blocks also make up for the errors before them
            far, near = (
                sum(float((stream - y).square().sum()) for (_, stream), y in zip(each.parts, wanted, strict=True))
                for each in (old, mine)
            )
        changed += int((ratio - 1).abs().max() > 1e-3)
    assert changed
    assert near < far
