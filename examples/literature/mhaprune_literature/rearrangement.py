"""Choose heads by the diagonal of the Fisher information, then exchange heads within each block by the full matrix.

Dimensions: E = examples, N = all heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mhaprune.heads import HeadMask
from mhaprune.schedules.base import Evidence, Stepwise


@dataclass(frozen=True)
class Rearrangement(Stepwise):
    """The mask that the diagonal of the Fisher information chooses, rearranged within each block (Kwon et al. 2022,
    sections 4.1 and 4.2).

    With m the gates of the mask, 1 for a kept head, the loss rises by about half of Σ_b (1 − m_b)ᵀ F_b (1 − m_b). F_b
    is the empirical Fisher information of the gates of block b: the mean over examples of the outer product of the
    gradient with itself. The first mask uses only the diagonal of F_b. Then removed heads are exchanged for kept heads
    of their block, one pair at a time: always the pair that lowers the sum most, until no exchange lowers it. So each
    block keeps the number of heads of the first mask. Two heads with similar gradients cost more if both are removed
    than the sum of their single costs. The diagonal alone does not show this.
    """

    scoring = "none"

    def path(self, evidence: Evidence) -> Iterator[HeadMask]:
        gradients_EN = evidence.gradients().double()
        fisher_NN = gradients_EN.T @ gradients_EN / len(gradients_EN)
        mask = HeadMask(evidence.subject.grid)
        diagonal = dict(zip(mask.grid, fisher_NN.diagonal().tolist(), strict=True))
        yield mask
        while candidates := self.removable(evidence, mask):
            mask = mask.without(min(candidates, key=diagonal.__getitem__))
            removed, grid = set(map(mask.grid.index, mask.removed)), mask.grid
            gone = [_exchanged(removed, grid.positions(block), fisher_NN) for block in grid.blocks]
            yield HeadMask(grid, frozenset(grid.heads[n] for heads in gone for n in heads))


def _exchanged(removed: set[int], block: range, fisher_NN: Tensor) -> list[int]:
    """Return the positions on N, ascending, of the block's removed heads after the exchanges."""

    def rise(heads: list[int]) -> float:
        return float(fisher_NN[heads][:, heads].sum())

    best = [n for n in block if n in removed]
    while True:
        kept = [n for n in block if n not in best]
        exchanges = [sorted({*best, gone} - {back}) for back in best for gone in kept]
        better = min(exchanges, key=rise, default=best)
        if not rise(better) < rise(best):
            return best
        best = better
