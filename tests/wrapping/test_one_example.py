"""An example is judged by itself, at its own positions: limits per batch, and losses for another kind of model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_feed_forwards import Block, Net
from torch import Tensor, nn

import mhaprune
from mhaprune import losses
from mhaprune.hooks.blocks import Unsupported
from support.classifier import batches, classifier


class Limited(nn.Module):
    """A layer that keeps a number of tokens per batch, in the order of the examples, or halves large batches."""

    def __init__(self, limit: int, halves: bool) -> None:
        super().__init__()
        self.inner, self.limit, self.halves = Net(Block(), Block()), limit, halves

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.inner(ids)
        if self.halves:
            return out / (1 + (ids.numel() > self.limit))
        kept = torch.arange(ids.numel()).view(ids.shape) < self.limit
        return out * kept.float().mean(dim=1)[:, None]


@pytest.mark.parametrize("sizes", [[(5, 6)], [(2, 9), (5, 6), (2, 3)]])
@pytest.mark.parametrize("halves", [True, False])
def test_a_limit_that_only_the_largest_batch_reaches_is_seen(halves: bool, sizes: list[tuple[int, int]]) -> None:
    """Also if it is the last example that it reaches, and if the longest and the shortest are in another batch."""
    draw = torch.Generator().manual_seed(0)
    score = [(torch.randint(11, size, generator=draw), torch.zeros(size[0], dtype=torch.long)) for size in sizes]
    with pytest.raises(Unsupported, match=r"^model: what it says of an example depends on the other examples[^\n]*$"):
        mhaprune.wrap(Limited(25, halves).eval(), losses.classification, score=score)
    assert len(mhaprune.wrap(Limited(30, halves).eval(), losses.classification, score=score).grid)


class Decoder(nn.Module):
    def __init__(self, two_sided: bool) -> None:
        super().__init__()
        self.inner = Net(Block(), Block())
        self.config = SimpleNamespace(is_encoder_decoder=two_sided, use_cache=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        return {"logits": self.inner(input_ids)[:, None].expand(-1, input_ids.shape[1], -1)}


class OwnCausalLM(Decoder):
    pass


class OwnLMHeadModel(Decoder):
    pass


@pytest.mark.parametrize(
    ("kind", "two_sided", "loss", "labels", "other"),
    [
        (Decoder, True, losses.language_model, "own", "seq2seq"),
        (Decoder, False, losses.language_model, "moved", "seq2seq"),
        (OwnCausalLM, False, losses.seq2seq, "ids", "language_model"),
        (OwnLMHeadModel, False, losses.seq2seq, "ids", "language_model"),
        (OwnCausalLM, False, losses.seq2seq, "moved", None),
        (Decoder, False, losses.language_model, "ids", None),
        (Decoder, True, losses.seq2seq, "own", None),
    ],
)
def test_a_loss_that_judges_one_position_off_is_refused(
    kind: Any, two_sided: bool, loss: Any, labels: str, other: str | None
) -> None:
    ids = torch.arange(12).view(2, 6) % 3
    given = {"own": ids.flip(1), "moved": ids.roll(-1, 1), "ids": ids}[labels].clone()
    given[:, -1] = -100
    batch = [{"input_ids": ids, "labels": given}]
    if other is None:
        assert len(mhaprune.wrap(kind(two_sided).eval(), loss, score=batch).grid)
        return
    with pytest.raises(ValueError, match=rf"^loss: [^\n]*; use losses.{other}$"):
        mhaprune.wrap(kind(two_sided).eval(), loss, score=batch)


def test_batches_of_one_example_may_be_padded_to_one_length() -> None:
    (batch,) = batches(1)
    score = [{name: x[n : n + 1] for name, x in batch.items()} for n in range(len(batch["labels"]))]
    assert len(mhaprune.wrap(classifier(), losses.classification, score=score).grid) == 8
