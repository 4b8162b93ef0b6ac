"""What is timed: the encoder, the decoder or both, in models of any size, and how many operations that takes.

Dimensions: S = source, T = target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from mhaprune.data import SPECIAL, Examples
from mhaprune.heads import HeadGrid, HeadMask, Site
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq

What = Literal["encoder", "decoder", "both"]
"""One pass of the encoder; greedy decoding with a KV cache from the encoder's output; both in turn, which is what a
user waits for."""


@dataclass(frozen=True)
class Workload:
    """What a model does in one call. For the encoder alone the target length is 0."""

    what: What
    batch_size: int
    source_length: int
    target_length: int

    def shape(self, whole: Transformer) -> Transformer:
        """The shape of a model that does only this.

        A decoder alone has an encoder without layers: it reads the embedded source, which has the shape of an encoder's
        output, at almost no cost.
        """
        return replace(whole, num_encoder_layers=0) if self.what == "decoder" else whole

    def batch(self, vocabulary_size: int, device: torch.device) -> Examples:
        """Random symbols, none of them special, so that nothing is padding."""
        draw = torch.Generator().manual_seed(0)
        source, target = (
            torch.randint(len(SPECIAL), vocabulary_size, (self.batch_size, length), generator=draw)
            for length in (self.source_length, self.target_length)
        )
        return Examples(source, target).to(device)

    def call(self, model: Seq2Seq, batch: Examples) -> Callable[[], object]:
        return partial(model.encode, batch.source) if self.what == "encoder" else partial(model.predict, batch)

    def grid(self, grid: HeadGrid) -> HeadGrid:
        """The heads of a model that take part in it."""
        sites = {"encoder": [Site.ENCODER_SELF], "decoder": [Site.DECODER_SELF, Site.CROSS], "both": list(Site)}
        return only(grid, *sites[self.what])

    def count_flops(self, model: Seq2Seq, batch: Examples) -> int:
        """Floating-point operations of one call: two for each multiply-add of a matrix product.

        Those of decoding are those of a `logits` call, less what a decoder that sees no later token saves: of T
        positions one attends to T, one to T-1 and so on. An encoder that no cross-attention reads is not run.
        """
        if self.what == "encoder":
            return _encoder_flops(model, batch)
        length = batch.target.shape[1]
        unseen = 2 * len(batch) * length * (length - 1) * _width(model, Site.DECODER_SELF)
        unread = 0 if len(only(model.grid, Site.CROSS)) else _encoder_flops(model, batch)
        return model.count_flops(batch) - unseen - unread


def _encoder_flops(model: Seq2Seq, batch: Examples) -> int:
    config, length = model.config, batch.source.shape[1]
    attention = _width(model, Site.ENCODER_SELF) * (4 * config.d_model + 2 * length)
    feed_forward = config.num_encoder_layers * 2 * config.d_model * config.dim_feedforward
    return 2 * len(batch) * length * (attention + feed_forward)


def _width(model: Seq2Seq, site: Site) -> int:
    """Of all heads at a site, side by side."""
    return model.head_dim * len(only(model.grid, site))


def only(grid: HeadGrid, *sites: Site) -> HeadGrid:
    """The blocks of a grid at these sites, with their heads."""
    blocks = tuple(block for block in grid.blocks if block.site in sites)
    return HeadGrid(blocks, tuple(head for head in grid if head.block in blocks))


def scaled(shape: Transformer, d_model: int, max_length: int) -> Transformer:
    """The same numbers of layers and heads at another width, the feed-forward in proportion."""
    dim_feedforward = max(1, round(shape.dim_feedforward * d_model / shape.d_model))
    return replace(shape, d_model=d_model, dim_feedforward=dim_feedforward, max_length=max_length)


def evenly(grid: HeadGrid, count: int) -> HeadMask:
    """A mask with this number of heads removed, evenly from all blocks and the first ones of each."""
    blocks = len(grid.blocks)
    shares = [(i + 1) * count // blocks - i * count // blocks for i in range(blocks)]
    taken = [n for block, share in zip(grid.blocks, shares, strict=True) for n in grid.positions(block)[:share]]
    return HeadMask(grid, frozenset(grid.heads[n] for n in taken))
