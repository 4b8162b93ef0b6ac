"""Scores against loops that a reader can check by eye."""

import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.measure.outcomes import measure
from mhaprune.scorers.fisher import Fisher
from mhaprune_literature.all_but_one import AllButOne
from mhaprune_literature.attention import Confidence, Entropy
from mhaprune_literature.knowledge import Knowledge
from scorers.test_scorers import one_by_one, written_norms


def test_knowledge_is_half_of_fisher_and_the_mean_square_of_what_a_head_writes(model: Seq2Seq, splits: Splits) -> None:
    sizes = torch.stack([each.square().mean() for each in written_norms(model, splits.score)]) / 12
    fisher = Fisher()(model, splits.score, seed=0).values[0]
    for factor in (0.0, 3.0):
        scores = Knowledge(representation=factor)(model, splits.score, seed=0)
        torch.testing.assert_close(scores.values[0], fisher / 2 + factor * sizes)
        assert (scores.forward_passes, scores.backward_passes) == (2, 1)
    usual = Knowledge()(model, splits.score, seed=0).values[0]
    torch.testing.assert_close(usual, fisher / 2 + 0.00025 * sizes, msg="the λ of the published script")


@torch.no_grad()
def test_all_but_one_keeps_one_head_of_a_block(model: Seq2Seq, splits: Splits) -> None:
    scores = AllButOne()(model, splits.score, seed=0).values[0]
    for n, head in enumerate(model.grid):
        others = [other for other in model.grid if other.block == head.block and other != head]
        gates = HeadMask(model.grid, frozenset(others)).gates()
        torch.testing.assert_close(scores[n], -measure(model, splits.score, gates).loss.mean())


@torch.no_grad()
def test_confidence_and_entropy_are_the_loop_over_tokens(model: Seq2Seq, splits: Splits) -> None:
    peaks: dict[int, list[Tensor]] = {n: [] for n in range(len(model.grid))}
    spreads: dict[int, list[Tensor]] = {n: [] for n in range(len(model.grid))}
    for one in one_by_one(splits.score):
        for block, seen in model.attention_maps(one).items():
            for head, n in enumerate(model.grid.positions(block)):
                for t, weights in enumerate(seen.weights[0, head]):
                    spreads[n].append((weights[weights > 0] * weights[weights > 0].log()).sum())
                    # The last symbol of the source is end of sequence.
                    real = weights if block.site == Site.DECODER_SELF else weights[:-1]
                    if block.site != Site.ENCODER_SELF or t < len(seen.weights[0, head]) - 1:
                        peaks[n].append(real.max())
    for scorer, expected in ((Confidence(), peaks), (Entropy(), spreads)):
        values = scorer(model, splits.score, seed=0).values[0]
        torch.testing.assert_close(values, torch.stack([torch.stack(expected[n]).mean() for n in expected]))
