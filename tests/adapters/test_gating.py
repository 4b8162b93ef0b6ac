from __future__ import annotations

import pytest
import torch

from classifier import Classifier, batches
from mhaprune import losses
from mhaprune.adapters.heads import Heads
from mhaprune.adapters.wrap import wrap


@pytest.fixture(scope="module")
def heads() -> Heads:
    return wrap(Classifier().double(), losses.classification, score=batches(1))


def test_a_closed_gate_lets_its_fallback_through_instead_of_nothing(heads: Heads) -> None:
    """Half of a head and half of what it says itself is the head; of twice that, it is one and a half of it."""
    subject, split = heads.subject, heads.splits["score"]
    own, n = subject.head_outputs(split), len(subject.grid)
    half, closed = torch.full((n,), 0.5).double(), torch.zeros(n).double()

    def losses_of(gates_N: torch.Tensor, times: float | None = None) -> torch.Tensor:
        fallback = None if times is None else {block: times * context for block, context in own.items()}
        with torch.no_grad():
            return subject.evaluate(split, gates_N, fallback).loss

    first = {head for head in subject.grid if head.block == subject.grid.blocks[0]}
    of_first = torch.tensor([head in first for head in subject.grid])
    open_E = subject.evaluate(split).loss.detach()
    torch.testing.assert_close(losses_of(half, 1.0), open_E)
    torch.testing.assert_close(losses_of(closed, 1.0), open_E)
    assert (losses_of(closed) - open_E).abs().max() > 1e-3
    # The second block reads what the first one wrote, so only one of them can be asked for another scale.
    expected = losses_of(torch.where(of_first, 1.5, 1.0).double())
    gates = torch.where(of_first, 0.5, 1.0).double()
    torch.testing.assert_close(losses_of(gates, 2.0), expected)
