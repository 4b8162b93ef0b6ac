"""Score: how little the head repeats another head of its block.

Dimensions: B = batch, T = positions, X = tokens of a batch, H = heads of a block, K = head_dim, D = model width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import BlockId
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.subject import Subject

ROUNDING = 1e-12
"""The smallest ratio of variance to mean square that counts. If the ratio is smaller, the variance is taken for
rounding."""


@dataclass(frozen=True)
class Redundancy(Scorer):
    """1 minus the largest cosine between the head and another head of its block. The cosine compares what the two heads
    write: the output c_n times O_n, the slice of W_O that reads the head, minus the mean over tokens, as one vector
    over all tokens.

    Bian et al. 2021 call heads redundant whose attention maps are alike. Here what the heads write is compared, because
    heads that look at the same places may still tell the model different things. A head that writes the same at every
    token scores 0. A head scores 1 if no other head of its block varies between tokens. Two heads that repeat each
    other both score low, so this score belongs with a schedule that scores again after each removal.
    """

    family: ClassVar[str] = "reconstruction"

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        weights = subject.output_weights()
        tokens: dict[BlockId, Tensor] = {}
        sums: dict[BlockId, Tensor] = {}
        products: dict[BlockId, Tensor] = {}
        for batch in examples.batches(BATCH_SIZE):
            valid = subject.queries(batch)
            for block, context_BHTK in subject.head_outputs(batch).items():
                written_XHD = (context_BHTK @ weights[block]).transpose(1, 2)[valid[block]].double()
                written_HX = written_XHD.movedim(1, 0).flatten(1)
                tokens[block] = tokens.get(block, 0) + valid[block].sum()
                sums[block] = sums.get(block, 0) + written_XHD.sum(dim=0)
                products[block] = products.get(block, 0) + written_HX @ written_HX.T
        repeated = [
            most_alike(products[block] / tokens[block], sums[block] / tokens[block]) for block in subject.grid.blocks
        ]
        return Scores(1 - torch.cat(repeated)[None], forward_passes=1)


def most_alike(products_HH: Tensor, means_HD: Tensor) -> Tensor:
    """Return, for each head, the largest cosine with another head, (H,). It is computed from the mean products and the
    means of what heads write. It is 1 for a head that does not vary, and 0 for a head without another varying head."""
    covariance_HH = products_HH - means_HD @ means_HD.T
    variance_H = covariance_HH.diagonal()
    varies_H = variance_H > ROUNDING * products_HH.diagonal()
    cosine_HH = covariance_HH / (variance_H[:, None] * variance_H).clamp_min(0).sqrt()
    others_HH = varies_H[:, None] & varies_H & ~torch.eye(len(varies_H), dtype=torch.bool, device=varies_H.device)
    largest_H = cosine_HH.masked_fill(~others_HH, -torch.inf).max(dim=1).values if len(varies_H) else variance_H
    largest_H = torch.where(others_HH.any(dim=1), largest_H, 0.0)
    return torch.where(varies_H, largest_H, 1.0)
