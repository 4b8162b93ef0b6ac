"""What the other heads of a block say too, or can stand in for: against cosines, least squares and copies."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mhaprune.data import PAD, Examples, Splits
from mhaprune.heads import Block, HeadMask, Site
from mhaprune.measure.outcomes import measure
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.ablation import Ablation, predicted
from mhaprune.scorers.redundancy import Redundancy
from mhaprune.scorers.refit_error import RefitError

BLOCKS = [Block(Site.ENCODER_SELF, 1), Block(Site.DECODER_SELF, 0), Block(Site.CROSS, 0)]


@torch.no_grad()
@pytest.mark.parametrize("block", BLOCKS)
def test_the_score_is_one_less_the_largest_cosine_of_centred_outputs(
    model: Seq2Seq, splits: Splits, block: Block
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
    block = Block(Site.DECODER_SELF, 1)
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


TINY = 1e-9


def outputs_and_rest(model: Seq2Seq, examples: Examples, block: Block, head: int) -> tuple[Tensor, Tensor]:
    """At every token what a head puts out, (X, K), and what the others of its block do and a one, (X, 1 + K·(H-1))."""
    tokens = examples.source if block.site == Site.ENCODER_SELF else examples.target
    context_XHK = model.head_outputs(examples)[block].transpose(1, 2)[tokens != PAD]
    others = torch.cat([context_XHK[:, :head], context_XHK[:, head + 1 :]], dim=1).flatten(1)
    return context_XHK[:, head], torch.cat([torch.ones(len(others), 1), others], dim=1)


@torch.no_grad()
def test_the_score_is_the_error_that_least_squares_leaves(model: Seq2Seq, splits: Splits) -> None:
    scores, gates = RefitError(ridge=TINY)(model, splits.score, 0).values[0], model.learned_gates()
    assert gates is not None
    for n, (head, score) in enumerate(zip(model.grid, scores, strict=True)):
        own, rest = outputs_and_rest(model, splits.score, head.block, head.head)
        wanted = gates[n] * own @ model.output_weights()[head.block][head.head]
        left = wanted - rest @ torch.linalg.lstsq(rest, wanted).solution
        torch.testing.assert_close(score, left.square().sum(dim=1).mean(), rtol=1e-5, atol=1e-12)


@torch.no_grad()
def test_ablation_by_what_is_predicted_is_the_loss_with_a_new_output_projection(model: Seq2Seq, splits: Splits) -> None:
    replacement, dense = predicted(model, splits.score, TINY), measure(model, splits.score).loss
    for head in (model.grid.heads[1], model.grid.heads[-1]):
        own, rest = outputs_and_rest(model, splits.score, head.block, head.head)
        moved = torch.linalg.lstsq(rest, own).solution @ model.output_weights()[head.block][head.head]
        mask = HeadMask(model.grid).without(head)
        gate = model.learned_gates()[model.grid.heads.index(head)]  # type: ignore[index]
        refitted = model.without(mask)
        projection = refitted.attention_sublayers()[head.block].attention.out_proj
        projection.bias += gate * moved[0]
        projection.weight += gate * moved[1:].T
        loss = measure(refitted, splits.score).loss
        torch.testing.assert_close(measure(model, splits.score, mask.gates(), replacement).loss, loss)
        assert not torch.allclose(loss, dense)
    default = Ablation(replace="predicted")(model, splits.score, 0)
    torch.testing.assert_close(default.values[0, -1], (loss - dense).mean(), rtol=0.05, atol=1e-3)
    assert default.forward_passes == 1 + len(model.grid) + 2
