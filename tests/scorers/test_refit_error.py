"""What the other heads of a block can stand in for, against least squares."""

import torch
from torch import Tensor

from mhaprune.data import PAD, Examples, Splits
from mhaprune.heads import BlockId, Site
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.refit_error import RefitError

TINY = 1e-9


def outputs_and_rest(model: Seq2Seq, examples: Examples, block: BlockId, head: int) -> tuple[Tensor, Tensor]:
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
