from __future__ import annotations

import pytest
import torch

from mhaprune import losses
from mhaprune.front.heads import Heads, wrap
from support.classifier import Classifier, batches


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


class Windows(Classifier):
    """Attention within windows of two tokens, each of which is a row of its own."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        x = self.embedding(input_ids)
        for attention in self.attention:
            rows = x.reshape(-1, 2, x.shape[-1])
            x = x + attention(rows, rows, rows)[0].reshape(x.shape)
        return {"logits": self.output(x.mean(dim=1))}


def test_gates_of_an_example_reach_all_of_its_windows() -> None:
    """Each example has gates of its own, and loses what it loses alone."""
    torch.manual_seed(0)
    heads = wrap(Windows().double(), losses.classification, score=batches(1))
    subject, split = heads.subject, heads.splits["score"]
    gates_BN = torch.rand(len(split), len(subject.grid)).double()
    together = subject.evaluate(split, gates_BN).loss
    alone = torch.cat([subject.evaluate(split[e : e + 1], gates_BN[e]).loss for e in range(len(split))])
    torch.testing.assert_close(together, alone)
