"""The network map by map is the network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhaprune.data import PAD, Examples
from mhaprune.heads import HeadMask
from mhaprune.model.transformer import Seq2Seq


def end_of(model: Seq2Seq, batch: Examples) -> Tensor:
    *_, last = model.last_maps([batch])
    return last.parts[0][1]


@pytest.mark.parametrize("gone", [0, 1, 5, 18])
@torch.no_grad()
def test_the_last_one_ends_where_the_network_does(model: Seq2Seq, batch: Examples, gone: int) -> None:
    """With live gates, with folded ones, with ragged and with empty blocks. Padding is left out."""
    for one in (model, model.without(HeadMask(model.grid, frozenset(model.grid.heads[:gone])))):
        torch.testing.assert_close(one.output(one.decoder_norm(end_of(one, batch))), one.outputs(batch))
        widths = {each.name: each.parts[0][0].shape for each in one.last_maps([batch])}
        of_encoder, of_decoder = int((batch.source != PAD).sum()), int((batch.target != PAD).sum())
        assert of_encoder < batch.source.numel(), "the fixture must have padding"
        heads = {block.out: block.heads for block in one.blocks}
        own, cross = "self_attention.attention.out_proj", "cross.attention.out_proj"
        of_layers = {"encoder": (own, "feed_forward.4"), "decoder": (own, cross, "feed_forward.4")}
        assert list(widths) == [f"{side}.{n}.{last}" for side in of_layers for n in (0, 1) for last in of_layers[side]]
        for name, shape in widths.items():
            width = heads[name] * one.head_dim if name in heads else one.config.dim_feedforward
            assert shape == (of_encoder if name.startswith("encoder") else of_decoder, width)
