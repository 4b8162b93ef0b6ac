"""Integrated gradients against loops, and against the gradients of attention weights."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import BlockId, HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.measure.outcomes import measure
from mhaprune_literature.integrated_gradients import IntegratedGradients
from support.models import loss_of_one


def loss_at(model: Seq2Seq, examples: Examples, closed: Sequence[int]) -> Tensor:
    gates = torch.ones(len(model.grid)).double()
    gates[closed] = 0.0
    return measure(model, examples, gates).loss.mean()


def test_integrated_gradients_sum_to_what_the_loss_falls_by(model: Seq2Seq, splits: Splits) -> None:
    some = splits.score[:2]
    scores = IntegratedGradients(path="all", steps=100)(model, some, seed=0)
    fall = loss_at(model, some, range(len(model.grid))) - loss_at(model, some, [])
    torch.testing.assert_close(scores.values.sum(), fall, rtol=1e-3, atol=0)
    assert scores.forward_passes == scores.backward_passes == 100


def test_integrated_gradients_scale_one_block_while_the_others_stay_open(model: Seq2Seq, splits: Splits) -> None:
    """One example and one point at a time. Blocks may be ragged; one that is empty takes no pass."""
    heads = model.grid.heads
    model, examples = model.without(HeadMask(model.grid, frozenset([heads[1], *heads[3:6]]))), splits.score[:4]
    by_hand = torch.zeros(4, len(model.grid)).double()
    for block in model.grid.blocks:
        heads = list(model.grid.positions(block))
        for e, (source, target) in enumerate(zip(examples.source, examples.target, strict=True)):
            for alpha in (1 / 6, 3 / 6, 5 / 6):
                gates = torch.ones(len(model.grid)).double()
                gates[heads] = alpha
                gates.requires_grad_()
                (gradient,) = torch.autograd.grad(loss_of_one(model, source, target, gates), gates)
                by_hand[e, heads] -= gradient[heads] / 3
    scores = IntegratedGradients(steps=3)(model, examples, seed=0)
    torch.testing.assert_close(scores.values[0], by_hand.mean(0))
    assert scores.stderr is not None
    torch.testing.assert_close(scores.stderr[0], by_hand.std(0) / 4**0.5)
    assert scores.forward_passes == scores.backward_passes == 3 * 5


@pytest.mark.parametrize(
    "block", [BlockId(Site.ENCODER_SELF, 1), BlockId(Site.DECODER_SELF, 0), BlockId(Site.CROSS, 0)]
)
def test_integrated_gradients_are_attention_attribution_summed_over_queries_and_keys(
    model: Seq2Seq, splits: Splits, block: BlockId
) -> None:
    """-Σ A ⊙ ∫ ∂ℓ/∂A dα with the weights A of the block scaled by α, by gradients of the weights themselves."""
    attention = model.attention_sublayers()[block].attention
    plain, steps = attention.attend, 4
    total = torch.zeros(3).double()
    for alpha in [(step + 0.5) / steps for step in range(steps)]:
        seen: list[tuple[Tensor, Tensor]] = []

        def scaled(
            query: Tensor, key: Tensor, values: Tensor, bias: Tensor | None = None, *, is_causal: bool = False,
            need_weights: bool = False, alpha: float = alpha, seen: list[tuple[Tensor, Tensor]] = seen,
        ) -> tuple[Tensor, None]:  # fmt: skip
            _, weights = plain(query, key, values, bias, is_causal=is_causal, need_weights=True)
            assert weights is not None
            at = (alpha * weights.detach()).requires_grad_()
            seen.append((weights.detach(), at))
            return at @ values, None

        attention.attend = scaled  # type: ignore[method-assign,assignment]
        loss = model.evaluate(splits.score).loss.mean()
        ((weights, at),) = seen
        total -= (weights * torch.autograd.grad(loss, at)[0]).sum(dim=(0, 2, 3)) / steps
    del attention.attend
    scores = IntegratedGradients(steps=steps)(model, splits.score, seed=0)
    torch.testing.assert_close(model.grid.split(scores.values)[block][0], total)
