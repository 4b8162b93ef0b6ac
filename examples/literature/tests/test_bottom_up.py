"""The heads of one block after the other, against a plain loop."""

import pytest

from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.pruning.plans import Search
from mhaprune.recoveries.refitting import refit, show
from mhaprune.schedules.iterative import Iterative
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.scoring import Scoring
from mhaprune_literature.bottom_up import BottomUp


@pytest.mark.slow
def test_bottom_up_settles_one_block_after_the_other_on_refitted_models(model: Seq2Seq, splits: Splits) -> None:
    """Against a plain loop."""
    score, budget = splits.score, 7
    shown = show(model, Examples(score.source[:16:2], score.target[:16:2]))
    mask = HeadMask(model.grid)
    for place, block in enumerate(model.grid.blocks):
        left = refit(model.without(mask), shown, 1e-3, feed_forward=False) if mask.removed else model
        worth = dict(zip(left.grid, Ablation()(left, score, 0).values[0].tolist(), strict=True))
        later = [head for head in left.grid if head.block in model.grid.blocks[place:]]
        weakest = sorted(later, key=worth.__getitem__)[: budget - len(mask.removed)]
        mask = HeadMask(model.grid, mask.removed | {head for head in weakest if head.block == block})
    search = Search(Scoring(model, score, 0), "ablation", Ablation())
    assert search(BottomUp(examples=16), [0, budget]) == [HeadMask(model.grid), mask]
    one_shot, iterative = (
        Search(Scoring(model, score, 0), "ablation", Ablation())(s, [7])[0] for s in (OneShot(), Iterative())
    )
    assert mask not in (one_shot, iterative), "the fixture must tell them apart"
