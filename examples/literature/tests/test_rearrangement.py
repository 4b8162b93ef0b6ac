"""Exchanges within a block lower the sum over the Fisher information, against a look at every exchange."""

from itertools import combinations

from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.measure.outcomes import gate_gradients
from mhaprune.pruning.plans import Search
from mhaprune.scorers.scoring import Scoring
from mhaprune_literature.rearrangement import Rearrangement


def test_every_block_keeps_its_number_of_heads_and_removes_the_best_set_of_it(model: Seq2Seq, splits: Splits) -> None:
    """Of three heads any two sets of one size are one exchange apart."""
    gradients = gate_gradients(model, splits.score)
    fisher = gradients.T @ gradients / len(gradients)
    search, grid = Search(Scoring(model, splits.score, 0)), model.grid
    masks = search(Rearrangement(), range(len(grid) + 1))
    assert (search.cost["forward_passes"], search.cost["backward_passes"]) == (1, 1)
    rearranged = 0
    for removed, mask in enumerate(masks):
        first = HeadMask(grid, frozenset(grid.heads[n] for n in fisher.diagonal().argsort()[:removed].tolist()))
        rearranged += mask != first
        for block in grid.blocks:
            sizes = [sum(head.block == block for head in each.removed) for each in (first, mask)]
            assert sizes[0] == sizes[1]
            rises = {
                heads: fisher[list(heads)][:, heads].sum() for heads in combinations(grid.positions(block), sizes[0])
            }
            chosen = tuple(grid.index(head) for head in grid if head.block == block and head in mask.removed)
            assert rises[chosen] == min(rises.values())
    assert rearranged, "the fixture must tell right from wrong"
