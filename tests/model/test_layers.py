from __future__ import annotations

import torch

from mhaprune.heads import Block, Site
from mhaprune.model.network import AttentionSublayer, FeedForward


def test_dropout_acts_in_training_only_and_token_by_token_also_without_heads() -> None:
    torch.manual_seed(0)
    x_BTD = torch.randn(2, 5, 12)
    for heads in (3, 0):
        sublayer = AttentionSublayer(Block(Site.ENCODER_SELF, 0), 12, heads, 4, 0.5, None)
        torch.nn.init.ones_(sublayer.attention.out_proj.bias)
        assert torch.equal(sublayer.eval()(x_BTD), sublayer(x_BTD))
        dropped = (sublayer.train()(x_BTD) == x_BTD).flatten(0, 1)
        assert dropped.any()
        assert not (dropped == dropped[0]).all(), heads  # a token has its own
    layer = FeedForward(12, 24, 0.5)
    assert torch.equal(layer.eval()(x_BTD), layer(x_BTD))
    assert torch.equal(layer(x_BTD), x_BTD + torch.nn.Sequential.forward(layer, x_BTD))
    assert not torch.equal(layer.train()(x_BTD), layer(x_BTD))
