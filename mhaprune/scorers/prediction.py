"""Linear regression of a head on the other heads of its block.

Dimensions: B = batch, T = positions, X = tokens of a split, H = heads of a block, K = head_dim, W = H·K.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import BlockId
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.subject import Subject

PASSES = 1
"""Number of forward passes over the split in a fit."""

EPSILON = 1e-12
"""The share of a mean square below which a variance in float64 is rounding."""


@dataclass(frozen=True)
class Prediction:
    """A linear prediction of each head's output from the other heads of its block."""

    means: Mapping[BlockId, Tensor]
    """(W,): the mean outputs of all heads, side by side."""
    maps: Mapping[BlockId, Tensor]
    """(H, W, K): for each head, the linear map from the outputs of all heads, minus their means, to the part of this
    head that is not predicted."""

    @classmethod
    @torch.no_grad()
    def fit(cls, subject: Subject, examples: Data, ridge: float) -> Prediction:
        """Fit by ridge regression with an intercept over all tokens of a split, padding excluded, in float64.

        The penalty on squared coefficients is `ridge` times the mean variance of an output. All regressions of a block
        come from P (W, W), the inverse of its regularised covariance. With the centred outputs A (X, W), the residual
        of head n is A P_n (P_nn)⁻¹: P_n are the K columns of P for head n, P_nn is its (K, K) block.
        """
        sizes = {block: weights.shape[:2] for block, weights in subject.output_weights().items()}
        maps, means = {}, {}
        for block, mean_W, covariance_WW in _moments(subject, examples, [list(sizes)]):
            means[block] = mean_W
            inverse_WHK = _inverse(mean_W, covariance_WW, ridge)[0].unflatten(1, sizes[block])
            own_HKK = inverse_WHK.unflatten(0, sizes[block]).diagonal(dim1=0, dim2=2).movedim(-1, 0)
            maps[block] = inverse_WHK.transpose(0, 1) @ torch.linalg.inv(own_HKK)
        return cls(means, maps)

    def missed(self, outputs: Mapping[BlockId, Tensor]) -> dict[BlockId, Tensor]:
        """Return, for each block, the part of the outputs (B, H, T, K) of its heads that is not predicted."""
        return {
            block: (
                (_side_by_side(context) - self.means[block].to(context)) @ self.maps[block].to(context)[:, None]
            ).transpose(0, 1)
            for block, context in outputs.items()
        }


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
    """Yield for each block P (W, W), see `Prediction.fit`, with the penalty that was added to every variance. The split
    is read once for each of `in_passes`.

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
