"""What is timed: models of every size, with heads removed evenly."""

import pytest
import torch

from mhaprune.heads import HeadMask
from mhaprune.lab.experiments.speed.matchup import Workload, evenly, scaled
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site

SHAPE = Transformer(d_model=12, num_heads=3, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=20)
WORK = Workload(3, 7, 5)


@pytest.mark.parametrize("removed", [0, 3, 6])
def test_flops_are_two_for_each_multiply_add(removed: int) -> None:
    """Here of the encoder's heads: queries, keys, values and output, scores and weighted values."""
    dense, batch = Seq2Seq(SHAPE, 11), WORK.batch(11, torch.device("cpu"))
    own = [head for head in dense.grid if head.site == Site.ENCODER_SELF]
    more, less = (dense.without(HeadMask(dense.grid, frozenset(own[:count]))) for count in (removed, len(own)))
    multiply_adds = 3 * 7 * 4 * (6 - removed) * (4 * 12 + 2 * 7)
    assert WORK.count_flops(more, batch) - WORK.count_flops(less, batch) == 2 * multiply_adds


def test_batches_have_their_size_and_no_special_symbols() -> None:
    batch = WORK.batch(11, torch.device("cpu"))
    assert batch.source.shape == (3, 7)
    assert batch.target.shape == (3, 5)
    assert batch.source.min() >= 3


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
