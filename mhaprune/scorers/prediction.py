"""Inverse covariances of the outputs of the heads of a block.

Dimensions: B = batch, T = positions, X = tokens of a split, H = heads of a block, K = head_dim, W = H·K.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import BlockId
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.subject import Subject

EPSILON = 1e-12
"""The share of a mean square below which a variance in float64 is rounding."""


LARGEST = 2**27
"""The largest number of products of outputs that are summed in one pass over the split."""
WIDE = 1024
"""The largest number of outputs of a block whose covariance is inverted in float64."""


def in_passes(subject: Subject) -> list[list[BlockId]]:
    """Return the blocks whose products are summed in each pass over the split, so that they fit into memory."""
    passes, held = list[list[BlockId]](), 0
    for block, weights_HKD in subject.output_weights().items():
        size = weights_HKD.shape[:2].numel() ** 2
        if not passes or held + size > LARGEST:
            passes.append([])
            held = 0
        passes[-1].append(block)
        held += size
    return passes


def inverse_covariances(
    subject: Subject, examples: Data, ridge: float
) -> Iterator[tuple[BlockId, tuple[Tensor, float]]]:
    """Yield for each block the inverse (W, W) of the covariance of its outputs over all tokens without padding, and the
    penalty that was added to every variance before: `ridge` times their mean. The split is read once for each of
    `in_passes`.

    More than `WIDE` outputs are inverted in float32, from their factor in float64: it has the root of their condition.
    """
    for block, mean_W, covariance_WW in _moments(subject, examples, in_passes(subject)):
        dtype = torch.float32 if len(mean_W) > WIDE else torch.float64
        yield block, _inverse(mean_W, covariance_WW, ridge, dtype)


def _moments(
    subject: Subject, examples: Data, passes: Sequence[Sequence[BlockId]]
) -> Iterator[tuple[BlockId, Tensor, Tensor]]:
    """Yield each block with the mean (W,) and the covariance (W, W) of its outputs over all tokens, in float64.

    The products of one batch are computed in the model's own precision, of outputs minus their means in the first
    batch. So a large mean costs no digits, and thousands of outputs take half the time.
    """
    for blocks in passes:
        sums: dict[BlockId, Tensor] = {}
        first: dict[BlockId, Tensor] = {}
        for batch in examples.batches(BATCH_SIZE):
            valid, contexts = subject.queries(batch), subject.head_outputs(batch)
            for block in blocks:
                outputs_XW = _side_by_side(contexts[block])[valid[block]]
                mean_W = first.setdefault(block, outputs_XW.mean(dim=0))
                outputs = torch.cat([outputs_XW - mean_W, outputs_XW.new_ones(len(outputs_XW), 1)], dim=1)
                products = outputs.T @ outputs
                sums[block] = sums[block].add_(products) if block in sums else products.double()
        for block in blocks:
            products = sums.pop(block)
            moved_W, covariance_WW = products[-1, :-1] / products[-1, -1], products[:-1, :-1]
            yield block, first[block] + moved_W, covariance_WW.div_(products[-1, -1]).addr_(moved_W, moved_W, alpha=-1)


def _inverse(
    mean_W: Tensor, covariance_WW: Tensor, ridge: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, float]:
    """Return the inverse of the covariance plus a penalty, and the penalty."""
    diagonal_W = covariance_WW.diagonal()  # a view
    # Outputs that are constant have a variance of rounding errors only, which may be below 0.
    rounding = EPSILON * (mean_W.square() + diagonal_W).mean()
    penalty = (ridge * diagonal_W.mean()).clamp_min(rounding).clamp_min(torch.finfo(torch.float64).tiny)
    diagonal_W += penalty
    return torch.cholesky_inverse(torch.linalg.cholesky(covariance_WW).to(dtype)), float(penalty)


def _side_by_side(context_BHTK: Tensor) -> Tensor:
    return context_BHTK.transpose(1, 2).flatten(2)
