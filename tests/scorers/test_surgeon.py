"""The order in which units go before a refit, against least squares."""

from itertools import accumulate

import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import BlockId
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.sequences import PAD
from mhaprune.scorers.surgeon import Surgeon

TINY = 1e-9


@torch.no_grad()
def test_each_score_is_what_least_squares_leaves_more_without_the_unit(model: Seq2Seq, splits: Splits) -> None:
    """One unit at a time, each time the one whose loss after a refit of the others is least."""
    scores, alone = (
        model.grid.split(Surgeon(ridge=TINY, step=step)(model, splits.score, 0).values[0]) for step in (0.0, 1.0)
    )
    gates = model.grid.split(model.learned_gates())  # type: ignore[arg-type]
    for block in (BlockId(Site.ENCODER_SELF, 0), BlockId(Site.CROSS, 1)):
        tokens = splits.score.source if block.site == Site.ENCODER_SELF else splits.score.target
        context_XHK = model.head_outputs(splits.score)[block].transpose(1, 2)[tokens != PAD].double()
        context_XHK = context_XHK - context_XHK.mean(dim=0)
        weights_HKD = gates[block][:, None, None] * model.output_weights()[block]
        wanted = torch.einsum("xhk,hkd->xd", context_XHK, weights_HKD.double())

        def error(kept: list[int], inputs: Tensor = context_XHK, wanted: Tensor = wanted) -> float:
            rest = inputs[:, kept].flatten(1)
            left = wanted - rest @ torch.linalg.lstsq(rest, wanted).solution if kept else wanted
            return float(left.square().sum(dim=1).mean())

        left, expected, before = [0, 1, 2], {}, 0.0
        while left:
            errors = {h: error([other for other in left if other != h]) for h in left}
            if len(left) == 3:
                torch.testing.assert_close(alone[block].tolist(), list(errors.values()), rtol=1e-4, atol=1e-10)
            first = min(errors, key=errors.__getitem__)
            expected[first], before = errors[first] - before, errors[first]
            left.remove(first)
        rises = accumulate(expected.values(), max)
        for head, rise in zip(expected, rises, strict=True):
            torch.testing.assert_close(float(scores[block][head]), rise, rtol=1e-4, atol=1e-10)
