from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mhaprune.experiments.speed.matchup import What, Workload, evenly, only, scaled
from mhaprune.heads import HeadMask, Site
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq

SHAPE = Transformer(d_model=12, num_heads=3, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=20)
WORKLOADS = [Workload("encoder", 3, 7, 0), Workload("decoder", 3, 7, 5), Workload("both", 3, 7, 5)]


def masks() -> list[HeadMask]:
    """None removed, half, a sixth left, no cross-attention, nothing left."""
    grid = Seq2Seq(SHAPE, 11).grid
    cross = HeadMask(grid, frozenset(only(grid, Site.CROSS)))
    return [*(evenly(grid, count) for count in (0, 9, 15)), cross, evenly(grid, 18)]


@pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: work.what)
@pytest.mark.parametrize("mask", masks(), ids=lambda mask: f"{len(mask.removed)} removed")
def test_flops_equal_what_torch_counts(work: Workload, mask: HeadMask) -> None:
    dense = Seq2Seq(work.shape(SHAPE), 11)
    model = dense.without(HeadMask(dense.grid, mask.removed & frozenset(dense.grid)))
    batch = work.batch(11, torch.device("cpu"))
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        work.call(model.train(), batch)()
    assert work.count_flops(model, batch) == counter.get_total_flops()


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
