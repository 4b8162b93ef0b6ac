"""Score: the error that a refit leaves when units go one after the other.

Dimensions: H = units of a block, K = columns of a unit, W = H·K, G = columns that go, D = outputs of the map.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import BlockId
from mhaprune.progress import track
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.prediction import in_passes, inverse_covariances
from mhaprune.settings.ranges import Gt, Within
from mhaprune.subject import Subject

COMPACT_BELOW = 0.8
"""Once fewer units than this share of those in a tensor are left, the tensor is made anew without the others."""


@dataclass(frozen=True)
class Surgeon(Scorer):
    """The rise of the squared error ‖A W − A' W'‖² per token when the unit is removed and the map that reads it, W_O or
    W_2, is refitted for the units that are left. Units of a block go in the order of least rise, so the score of a unit
    counts the loss of those before it. It is never below theirs.

    The optimal brain surgeon (Hassibi & Stork 1992) for sets of columns, as in ZipLM (Kurtic et al. 2023): with P the
    inverse covariance of the inputs, the rise for the columns u of a unit is tr(W_uᵀ (P_uu)⁻¹ W_u). `refit_error` is
    the score with `step=1`, the rise of each unit alone.
    """

    family: ClassVar[str] = "reconstruction"

    ridge: Annotated[float, Gt(0)] = 1e-3
    """The penalty on squared coefficients, as a multiple of the mean variance of an input."""
    step: Annotated[float, Within(0, 1)] = 0.05
    """How many units go in one step, at least one, as a share of those that are left. Smaller steps take longer; with 1
    each unit is looked at alone."""

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        weights, gates_N = subject.output_weights(), subject.learned_gates()
        gates: Mapping[BlockId, Tensor] = {} if gates_N is None else subject.grid.split(gates_N)
        covariances = inverse_covariances(subject, examples, self.ridge)
        rises = []
        for block, (inverse_WW, penalty) in track(covariances, "blocks", len(weights)):
            weights_HKD = weights[block].double()
            weights_HKD = gates[block][:, None, None] * weights_HKD if gates else weights_HKD
            rises.append(self.rises(weights_HKD, inverse_WW, penalty))
        values_N = torch.cat(rises) if rises else torch.zeros(0)
        return Scores(values_N.to(subject.device)[None], forward_passes=len(in_passes(subject)))

    def rises(self, weights_HKD: Tensor, inverse_WW: Tensor, penalty: float) -> Tensor:
        """Return the rise for each unit, (H,), given the inverse of the covariance with the ridge, whose share of the
        rise, `penalty` · ‖W_u‖², is left out."""
        H, K, _ = weights_HKD.shape
        rises_H, left, at, highest = weights_HKD.new_zeros(H), torch.arange(H), torch.arange(H), 0.0
        inverse_WW, flat_WD = inverse_WW.clone(), weights_HKD.flatten(0, 1).to(inverse_WW, copy=True)
        while len(left):  # `at` says where in the tensors the units `left` are
            if len(at) < COMPACT_BELOW * len(flat_WD) // K:
                columns = _columns(at, K)
                inverse_WW, flat_WD, at = inverse_WW[columns][:, columns], flat_WD[columns], torch.arange(len(at))
            own_HKK = inverse_WW.unflatten(0, (-1, K)).unflatten(-1, (-1, K)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
            present_HKD = flat_WD.unflatten(0, (-1, K))
            squares_HKK = (present_HKD @ present_HKD.mT)[at]
            each_HKK = torch.linalg.solve(own_HKK[at], squares_HKK) - penalty * squares_HKK
            each_H = each_HKK.diagonal(dim1=1, dim2=2).sum(dim=1).clamp_min(0).to(rises_H)
            order = each_H.argsort(stable=True).cpu()
            go, stay = order.tensor_split([max(1, round(self.step * len(left)))])
            rises_H[left[go]] = each_H[go].clamp_min(highest)
            highest = float(rises_H[left[go]].max())
            if not len(stay):
                break
            gone = _columns(at[go], K)
            rows_GW = inverse_WW[gone]
            moved_GW = torch.linalg.solve(rows_GW[:, gone], rows_GW)
            flat_WD.addmm_(moved_GW.T, flat_WD[gone], alpha=-1)
            inverse_WW.addmm_(moved_GW.T, rows_GW, alpha=-1)
            left, at = left[stay], at[stay]
        return rises_H


def _columns(units: Tensor, width: int) -> Tensor:
    return (units[:, None] * width + torch.arange(width, device=units.device)).flatten()
