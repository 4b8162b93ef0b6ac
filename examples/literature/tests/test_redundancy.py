"""What the other heads of a block say too: against cosines and copies."""

import numpy as np
import pytest
import torch

from mhaprune.data import Splits
from mhaprune.heads import BlockId, HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.sequences import PAD
from mhaprune_literature.redundancy import Redundancy

BLOCKS = [BlockId(Site.ENCODER_SELF, 1), BlockId(Site.DECODER_SELF, 0), BlockId(Site.CROSS, 0)]


@torch.no_grad()
@pytest.mark.parametrize("block", BLOCKS)
def test_the_score_is_one_less_the_largest_cosine_of_centred_outputs(
    model: Seq2Seq, splits: Splits, block: BlockId
) -> None:
    tokens = splits.score.source if block.site == Site.ENCODER_SELF else splits.score.target
    outputs, weights = model.head_outputs(splits.score)[block], model.output_weights()[block]
    written = [(outputs[:, n][tokens != PAD] @ weights[n]).numpy() for n in range(3)]
    centred = [(one - one.mean(axis=0)).ravel() for one in written]
    unit = [one / np.linalg.norm(one) for one in centred]
    expected = [1 - max(unit[n] @ unit[m] for m in range(3) if m != n) for n in range(3)]
    found = model.grid.split(Redundancy()(model, splits.score, 0).values)[block][0]
    np.testing.assert_allclose(found, expected, rtol=1e-8)


@torch.no_grad()
def test_what_every_token_receives_repeats_nothing_and_tells_nothing(model: Seq2Seq, splits: Splits) -> None:
    """A head with constant values writes what a bias could; the others are compared without it."""
    block = BlockId(Site.DECODER_SELF, 1)
    attention = model.attention_sublayers()[block].attention
    attention.v_proj.weight[:4] = 0.0
    without = model.without(HeadMask(model.grid).without(next(head for head in model.grid if head.block == block)))
    constant, *others = model.grid.split(Redundancy()(model, splits.score, 0).values)[block][0].tolist()
    assert constant == 0
    assert others == pytest.approx(without.grid.split(Redundancy()(without, splits.score, 0).values)[block][0].tolist())


def test_a_head_that_is_alone_in_its_block_is_not_repeated(model: Seq2Seq, splits: Splits) -> None:
    left = model.without(HeadMask(model.grid, frozenset(model.grid.heads[:2])))
    scores = Redundancy()(left, splits.score, 0)
    assert left.grid.sizes[0] == 1
    assert scores.values[0, 0] == 1
    assert scores.forward_passes == 1
