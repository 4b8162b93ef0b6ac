"""Gradient and path scores against loops that a reader can check by eye."""

import pytest
import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import BlockId
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.measure.outcomes import gate_gradients
from mhaprune.scorers.fisher import Fisher
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
    contexts: dict[BlockId, Tensor] = {}

    def keep(block: BlockId) -> object:
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
    torch.testing.assert_close(scores.values[0], mean, rtol=1e-5, atol=1e-8)
    assert scores.stderr is not None
    torch.testing.assert_close(scores.stderr[0], expected, rtol=1e-5, atol=1e-8)


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
