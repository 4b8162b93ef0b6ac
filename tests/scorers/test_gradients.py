"""Gradient and path scores against loops that a reader can check by eye."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mhaprune.data import Examples, Splits
from mhaprune.heads import Block, HeadMask, Site
from mhaprune.measure.outcomes import gate_gradients, measure
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.fisher import Fisher
from mhaprune.scorers.integrated_gradients import IntegratedGradients
from mhaprune.scorers.taylor import Taylor
from support.models import loss_of_one


def gradients_by_hand(model: Seq2Seq, examples: Examples) -> Tensor:
    """One example at a time."""
    gradients = []
    for source, target in zip(examples.source, examples.target, strict=True):
        gates = torch.ones(len(model.grid), dtype=torch.float64, requires_grad=True)
        gradients += torch.autograd.grad(loss_of_one(model, source, target, gates), gates)
    return torch.stack(gradients)


def test_taylor_by_example_and_fisher_are_means_over_gradients_that_come_at_once(
    model: Seq2Seq, splits: Splits
) -> None:
    by_hand = gradients_by_hand(model, splits.score)
    torch.testing.assert_close(gate_gradients(model, splits.score, batch_size=7), by_hand)
    assert all(parameter.grad is None for parameter in model.parameters())
    taylor = Taylor(level="example")(model, splits.score, seed=0)
    torch.testing.assert_close(taylor.values[0], by_hand.abs().mean(0), rtol=1e-5, atol=1e-8)
    assert taylor.stderr is not None
    torch.testing.assert_close(taylor.stderr[0], by_hand.abs().std(0) / len(by_hand) ** 0.5, rtol=1e-5, atol=1e-8)
    fisher = Fisher()(model, splits.score, seed=0)
    torch.testing.assert_close(fisher.values[0], (by_hand**2).mean(0), rtol=1e-5, atol=1e-8)
    with pytest.raises(ValueError, match="score split of 1: a standard error needs 2 or more examples"):
        Fisher()(model, splits.score[:1], seed=0)


def test_taylor_of_a_batch_is_the_sum_of_outputs_times_their_gradients(model: Seq2Seq, splits: Splits) -> None:
    """|Σ c·∇c| over all that a head puts out, without any gate."""
    contexts: dict[Block, Tensor] = {}

    def keep(block: Block) -> object:
        attend = model.attention_sublayers()[block].attention.attend

        def keeping(*args: object, **kwargs: object) -> tuple[Tensor, None]:
            context, _ = attend(*args, **kwargs)  # type: ignore[arg-type]
            context.retain_grad()
            contexts[block] = context
            return context, None

        return keeping

    for block, sublayer in model.attention_sublayers().items():
        sublayer.attention.attend = keep(block)  # type: ignore[assignment,method-assign]
    model.judge(model.call(splits.score), splits.score).loss.mean().backward()
    by_hand = [(contexts[block] * contexts[block].grad).sum(dim=(0, 2, 3)).abs() for block in model.grid.blocks]
    for sublayer in model.attention_sublayers().values():
        del sublayer.attention.attend
    scores = Taylor(level="batch", batch_size=len(splits.score))(model, splits.score, seed=0)
    torch.testing.assert_close(scores.values[0], torch.cat(by_hand))
    assert scores.stderr is None


@pytest.mark.parametrize(("batch_size", "sizes"), [(10, (10, 10, 4)), (8, (8, 8, 8))])
def test_taylor_of_batches_and_its_standard_error_weigh_each_by_its_examples(
    model: Seq2Seq, splits: Splits, batch_size: int, sizes: tuple[int, ...]
) -> None:
    """Σ (share · (batch - mean))², times batches over batches less one; of equal batches it is that of their mean."""
    gradients = gradients_by_hand(model, splits.score)
    parts = [part.mean(0).abs() for part in gradients.split(list(sizes))]
    mean = sum((size / 24 * part for size, part in zip(sizes, parts, strict=True)), torch.zeros(18).double())
    squares = torch.zeros(18).double()
    for size, part in zip(sizes, parts, strict=True):
        squares += (size / 24 * (part - mean)) ** 2
    expected = (squares * len(sizes) / (len(sizes) - 1)).sqrt()
    if len(set(sizes)) == 1:
        torch.testing.assert_close(expected, torch.stack(parts).std(0) / len(sizes) ** 0.5)
    scores = Taylor(level="batch", batch_size=batch_size)(model, splits.score, seed=0)
    torch.testing.assert_close(scores.values[0], mean)
    assert scores.stderr is not None
    torch.testing.assert_close(scores.stderr[0], expected, rtol=1e-5, atol=1e-10)


def test_taylor_by_token_closes_one_token_at_a_time(model: Seq2Seq, splits: Splits) -> None:
    one = splits.score[:1]
    total = torch.zeros(len(model.grid), dtype=torch.float64)
    for block in model.grid.blocks:
        for head, n in enumerate(model.grid.positions(block)):
            for t in range(model.queries(one)[block].shape[1]):
                losses = []
                for step in (1e-5, -1e-5):
                    gates = {b: torch.ones(1, 3, v.shape[1]).double() for b, v in model.queries(one).items()}
                    gates[block][0, head, t] += step
                    losses.append(model.evaluate(one, gates).loss.detach())
                total[n] += ((losses[0] - losses[1]) / 2e-5).abs().squeeze()
    both = Examples(one.source.repeat(2, 1), one.target.repeat(2, 1))
    torch.testing.assert_close(Taylor(level="token")(model, both, 0).values[0], total, rtol=1e-5, atol=1e-8)


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


@pytest.mark.parametrize("block", [Block(Site.ENCODER_SELF, 1), Block(Site.DECODER_SELF, 0), Block(Site.CROSS, 0)])
def test_integrated_gradients_are_attention_attribution_summed_over_queries_and_keys(
    model: Seq2Seq, splits: Splits, block: Block
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
