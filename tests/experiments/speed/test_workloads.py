from __future__ import annotations

import pytest
import torch

from mhaprune.experiments.speed.matchup import What, Workload, evenly, scaled
from mhaprune.heads import Site
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq

SHAPE = Transformer(d_model=12, num_heads=3, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=20)
WORKLOADS = [Workload("encoder", 3, 7, 0), Workload("decoder", 3, 7, 5), Workload("both", 3, 7, 5)]


@pytest.mark.parametrize("removed", [0, 9, 18])
def test_flops_of_an_encoder_are_two_for_each_multiply_add(removed: int) -> None:
    """Of queries, keys, values and output, of scores and weighted values, and of two feed-forward maps per layer."""
    dense, [work, *_] = Seq2Seq(WORKLOADS[0].shape(SHAPE), 11), WORKLOADS
    mask = evenly(dense.grid, removed)
    width = 4 * (6 - sum(head.site == Site.ENCODER_SELF for head in mask.removed))
    multiply_adds = 3 * 7 * (width * (4 * 12 + 2 * 7) + 2 * 2 * 12 * 20)
    assert work.count_flops(dense.without(mask), work.batch(11, torch.device("cpu"))) == 2 * multiply_adds


def test_batches_have_their_size_and_no_special_symbols() -> None:
    for work in WORKLOADS:
        batch = work.batch(11, torch.device("cpu"))
        assert batch.source.shape == (3, 7)
        assert batch.target.shape == (3, work.target_length)
        assert batch.source.min() >= 3


@pytest.mark.parametrize(("what", "heads"), [("encoder", 6), ("decoder", 12), ("both", 18)])
def test_a_part_has_its_own_heads(what: What, heads: int) -> None:
    assert len(Workload(what, 1, 1, 1).grid(Seq2Seq(SHAPE, 11).grid)) == heads


def test_a_decoder_alone_has_the_decoder_of_the_whole() -> None:
    decoder, whole = Seq2Seq(WORKLOADS[1].shape(SHAPE), 11), Seq2Seq(SHAPE, 11)
    assert len(decoder.encoder) == 0
    names = [name for name, _ in decoder.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters() if not name.startswith("encoder.")]


def test_heads_go_evenly() -> None:
    grid = Seq2Seq(SHAPE, 11).grid
    for count in range(len(grid) + 1):
        left = grid.without(evenly(grid, count).removed).sizes
        assert sum(left) == len(grid) - count
        assert max(left) - min(left) <= 1


def test_another_width_keeps_the_proportions() -> None:
    wide = scaled(SHAPE, 24, 99)
    assert (wide.d_model, wide.dim_feedforward, wide.max_length) == (24, 40, 99)
    assert (wide.num_heads, wide.num_encoder_layers, wide.num_decoder_layers) == (3, 2, 2)
