"""One trained order of the heads for all sizes."""

import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune_literature.mattr import Mattr, gates_of_sum
from support.games import Game, numbered

WORTHS = torch.logspace(-2, 0.5, 12, dtype=torch.double)[[(5 * n + 2) % 12 for n in range(12)]]
"""Nats that each head is worth; no two alike."""


def worth_game(seen: list[Tensor]) -> Game:
    def loss(number: Tensor, gates: Tensor) -> Tensor:
        seen.append(gates.detach().clone())
        return ((1 - gates) * WORTHS).sum(dim=1)

    return Game(len(WORTHS), loss)


def test_one_training_orders_the_heads_for_all_sizes() -> None:
    seen: list[Tensor] = []
    values = Mattr(replace="zero", steps=300)(worth_game(seen), numbered(range(1, 65)), seed=0).values[0]
    assert values.argsort().tolist() == WORTHS.argsort().tolist()
    sums = torch.cat([gates.sum(dim=1) for gates in seen if not (gates == 1).all()])
    torch.testing.assert_close(sums, sums.round(), atol=1e-9, rtol=0)
    assert {*sums.round().int().tolist()} == {*range(1, 12)}


def test_a_head_without_which_the_loss_falls_counts_as_much() -> None:
    """The distance from the whole model is made small, not the loss."""

    def loss(number: Tensor, gates: Tensor) -> Tensor:
        return (1 - gates) @ torch.tensor([-3.0, 0.1, 0.2, 0.05]).double()

    values = Mattr(replace="zero", steps=200)(Game(4, loss), numbered(range(1, 65)), seed=0).values[0]
    assert values.argmax() == 0


def test_gates_have_the_sum_that_is_wanted_and_its_derivative() -> None:
    logits = torch.randn(5, 9, dtype=torch.double, requires_grad=True)
    sums = torch.tensor([1, 2, 4, 7, 8])
    for temperature in (2.0, 0.3):
        gates = gates_of_sum(logits, sums, temperature)
        torch.testing.assert_close(gates.sum(dim=1), sums.double())
        assert torch.autograd.gradcheck(lambda x, t=temperature: gates_of_sum(x, sums, t), logits)


def test_thresholds_are_found_far_from_the_logits() -> None:
    for total in (1, 4999):
        gates = gates_of_sum(torch.zeros(1, 5000, dtype=torch.double), torch.tensor([total]), 0.5)
        torch.testing.assert_close(gates.sum(), torch.tensor(total).double())


def test_the_temperature_falls_log_linearly() -> None:
    scorer, draw = Mattr(start_temperature=2.0, end_temperature=0.02), torch.Generator()
    logits = torch.linspace(-1, 1, 9, dtype=torch.double)
    for share, temperature in ((0, 2.0), (0.5, 0.2), (1, 0.02)):
        found = scorer.sample(logits, 64, share, draw.manual_seed(0))
        expected = gates_of_sum(logits.expand(64, -1), found.sum(dim=1).round(), temperature)
        torch.testing.assert_close(found, expected)


def test_heads_that_are_not_open_output_what_they_do_on_the_counterpart(model: Seq2Seq, splits: Splits) -> None:
    """Where both are the same, no head matters."""

    class Same(type(splits.score)):  # type: ignore[misc]
        def counterpart(self) -> "Same":
            return self

    few = splits.score
    same, other = Same(few.source, few.target), few
    still, moved = (Mattr(steps=5, batch_size=8)(model, each, seed=0) for each in (same, other))
    assert float(still.values.std()) < 1e-3 * float(moved.values.std())
    assert (moved.forward_passes, moved.backward_passes) == (3 * 5 * 8 / len(few), 5 * 8 / len(few))
