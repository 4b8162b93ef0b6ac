"""The network sublayer by sublayer is the network."""

from __future__ import annotations

import pytest
import torch

from mhaprune.data import PAD, Examples
from mhaprune.heads import HeadMask
from mhaprune.model.sublayers import Sublayer, sublayers
from mhaprune.model.transformer import Seq2Seq


def last_of(model: Seq2Seq, batch: Examples) -> Sublayer:
    *_, last = sublayers(model, batch)
    return last


@pytest.mark.parametrize("gone", [0, 1, 5, 18])
@torch.no_grad()
def test_the_last_one_ends_where_the_network_does(model: Seq2Seq, batch: Examples, gone: int) -> None:
    """With live gates, with folded ones, with ragged and with empty blocks."""
    for one in (model, model.without(HeadMask(model.grid, frozenset(model.grid.heads[:gone])))):
        logits = one.output(one.decoder_norm(last_of(one, batch).output()))
        torch.testing.assert_close(logits, one.logits(batch))
        names = [step.name for step in sublayers(one, batch)]
        assert names == [
            *("encoder_self.0", "encoder.0.feed_forward", "encoder_self.1", "encoder.1.feed_forward"),
            *("decoder_self.0", "cross.0", "decoder.0.feed_forward"),
            *("decoder_self.1", "cross.1", "decoder.1.feed_forward"),
        ]


@torch.no_grad()
def test_a_map_that_is_changed_on_the_way_decides_what_follows(model: Seq2Seq, batch: Examples) -> None:
    before = last_of(model, batch).output()
    for step in sublayers(model, batch):
        if step.name == "encoder_self.1":
            step.last.bias[0] += 1.0  # one of them: layer normalisation does not see a shift of all
            after = step.stream + step.last(step.hidden)
        if step.name == "encoder.1.feed_forward":
            torch.testing.assert_close(step.stream, after)
    assert not torch.allclose(step.output(), before)
    torch.testing.assert_close(step.output(), last_of(model, batch).output())


def test_padding_is_named(model: Seq2Seq, batch: Examples) -> None:
    for step in sublayers(model, batch):
        ids = batch.source if step.name.startswith("encoder") else batch.target
        assert torch.equal(step.valid, ids != PAD)
        assert not step.valid.all(), "the fixture must have padding"
