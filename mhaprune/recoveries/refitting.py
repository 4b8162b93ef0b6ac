"""Fit the last linear map of every sublayer anew, in closed form, to what the dense model computes.

Dimensions: T = tokens, W = inputs of a map, D = outputs.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import BATCH_SIZE, Diverged, by_length
from mhaprune.progress import track
from mhaprune.subject import Batch, Subject

log = logging.getLogger(__name__)

Fitted = TypeVar("Fitted", bound=Subject)
RIDGE = 1e-3
ENOUGH = 32
"""The smallest number of tokens per input of a map for which a single ridge is used. With fewer tokens, the best of
several ridges is chosen on held-out examples."""
RIDGES = (1, 10, 100, 1e3, 1e4, 1e5)
"""Factors that multiply the given ridge, if several ridges compete."""
PARTS = 10
"""The smallest number of batches to make, so that some can be held out to choose the ridge."""


class RefitTargets(NamedTuple):
    """The targets of a refit: batches without labels and, for each sublayer and batch, the dense model's residual
    stream after the sublayer at all real tokens, (tokens, D)."""

    batches: Sequence[Batch]
    streams: Sequence[Sequence[Tensor]]
    kinds: Sequence[str] = ()
    """The kind of the examples of each batch; none if kinds are not told apart."""


@torch.no_grad()
def show(dense: Subject, data: Data, batch_size: int = BATCH_SIZE) -> RefitTargets:
    """Return the targets of a refit. The same targets serve for every pruned model.

    No label is read. The targets hold the residual streams after all sublayers, in the precision of the model.
    """
    kinds = data.by_kind() or {"": torch.arange(len(data))}
    batches, of_kinds = [], []
    for kind, rows in kinds.items():
        own = data[rows]
        for batch, _ in by_length(dense.answered(own), max(1, min(batch_size, len(own) // PARTS)))[1]:
            batches.append(batch)
            of_kinds.append(kind)
    streams, widths = [], []
    for each in dense.last_maps(batches):
        streams.append([stream_TD for _, stream_TD in each.parts])
        widths.append(each.weight.shape[1])
    fewest = min(sum(map(len, stream)) for stream in streams)
    if fewest < max(widths):
        log.warning(
            "refit: %d tokens are fewer than the %d inputs of a map; what they leave open stays as it was",
            *(fewest, max(widths)),
        )
    return RefitTargets(batches, streams, of_kinds if len(kinds) > 1 else ())


@torch.no_grad()
def refit(pruned: Fitted, shown: RefitTargets, ridge: float = RIDGE, feed_forward: bool = True) -> Fitted:
    """Return a copy whose residual stream follows that of the dense model, at the cost of one pass and one solution per
    map.

    Sublayer by sublayer, in forward order, W_O or W_2 and its bias minimise

        ‖A W + b − (y − x)‖² + ridge · mean(diag AᵀA) · ‖W − W_old‖²

    over all tokens. y is the dense model's residual stream after the sublayer; x is the pruned model's stream before
    it, and A the input of the map. W_old is the map after the removal. In W_O the learned gates are folded, so the
    ridge acts on weights times gates. A sublayer also corrects the errors that remain from the sublayers before it. The
    bias of a block without heads becomes the mean of y − x.

    All batches go forward together. Raises `Diverged` if a stream is not finite.
    """
    model = pruned.copied()
    walk = zip(model.last_maps(shown.batches), shown.streams, strict=True)
    for each, wanted in track(walk, "sublayers", len(shown.streams)):
        if each.heads is None and not feed_forward:
            continue
        pairs = zip(each.parts, wanted, strict=True)
        parts = [(inputs_TW, wanted_TD - stream_TD) for (inputs_TW, stream_TD), wanted_TD in pairs]
        if not all(bool(missing_TD.isfinite().all()) for _, missing_TD in parts):
            raise Diverged(f"the states of {each.name} are not finite")
        tokens = sum(len(inputs_TW) for inputs_TW, _ in parts)
        several = ridges(ridge, 0 if shown.kinds else tokens, each.weight.shape[1])
        correct(each.weight, each.bias, parts, several, shown.kinds)
    return model


def ridges(least: float, tokens: int, inputs: int) -> list[float]:
    """Return the ridges that compete for a map: several if it has few tokens for its inputs, else one."""
    return [least * factor for factor in RIDGES] if tokens < ENOUGH * inputs else [least]


HELD_OUT = 5
"""Of every five batches, the second is held out to choose the ridge."""
DIRECTIONS = 64
"""The number of random directions of the outputs on which the ridge is chosen, if there are more outputs."""


@torch.no_grad()
def correct(
    weight_DW: Tensor,
    bias_D: Tensor | None,
    parts: Iterable[tuple[Tensor, Tensor]],
    ridge: float | Sequence[float],
    kinds: Sequence[str] = (),
) -> None:
    """Change the weight of a map by V (W, D) and its bias by c (D,), in place, so that its output gains what it lacks.
    A map without a bias has no c.

    Each part holds A, the inputs of the map (T, W), and E, what its output lacks (T, D). V and c minimise, over all
    parts,

        ‖A V + c − E‖² + ridge · mean(diag AᵀA) · ‖V‖²

    They solve the normal equations in float64, so only sums over the parts are kept. With fewer tokens than inputs, V
    is sought in the space that the inputs span, where the solution lies: one unknown per token. Forming AᵀA squares the
    condition number, which float64 affords for inputs in float32. If there are several solutions (for example without a
    ridge and with fewer tokens than inputs), the smallest V and c are taken.

    With several ridges, each is fitted on the parts that are not held out, and the ridge with the smallest error on the
    held-out parts is used to fit all parts; of many outputs, the error in `DIRECTIONS` stands for all. With only one
    part, the largest ridge is taken. If `kinds` names the kind of each part, each kind is held out in turn, and its
    error counts as a share of what its outputs lack: so the ridge is one that serves kinds which the fit has not read.
    """
    D, W = weight_DW.shape
    parts, ridges = list(parts), [ridge] if isinstance(ridge, int | float) else list(ridge)
    basis_WU = None  # U unknowns in place of W
    if min(ridges) > 0 and sum(len(inputs_TW) for inputs_TW, _ in parts) < W:
        basis_WU = torch.linalg.qr(torch.cat([inputs_TW for inputs_TW, _ in parts]).double().T)[0]
        parts = [(inputs_TW.double() @ basis_WU, missing_TD) for inputs_TW, missing_TD in parts]
    U = W if basis_WU is None else basis_WU.shape[1]
    ridges = [each * U / max(1, W) for each in ridges]  # the mean of diag AᵀA is over W inputs
    unknowns = U if bias_D is None else U + 1
    nothing = _Sums(weight_DW.new_zeros(unknowns, unknowns).double(), weight_DW.new_zeros(unknowns, D).double())
    folds: dict[str | bool, _Sums] = {}
    for i, (inputs_TU, missing_TD) in enumerate(parts):
        inputs = F.pad(inputs_TU.double(), (0, unknowns - U), value=1.0)  # a last column for the bias
        missing = missing_TD.double()
        sums = _Sums(inputs.T @ inputs, inputs.T @ missing, float(missing.square().sum()))
        fold = kinds[i] if kinds else len(ridges) > 1 and i % HELD_OUT == 1
        folds[fold] = folds.get(fold, nothing).plus(sums)
    best = max(ridges)
    if len(folds) > 1 and len(ridges) > 1:
        errors = dict.fromkeys(ridges, 0.0)
        for held in folds if kinds else [True]:
            fit = nothing.plus(*(fold for name, fold in folds.items() if name != held)).seen_from(DIRECTIONS)
            tried = folds[held].seen_from(DIRECTIONS)
            for each in ridges:
                errors[each] += tried.error(fit.solved(each, U)) / (tried.size or 1.0)
        best = min(ridges, key=lambda each: errors[each])
    change = nothing.plus(*folds.values()).solved(best, U)
    weight_DW.add_((change[:U] if basis_WU is None else basis_WU @ change[:U]).T)
    if bias_D is not None:
        bias_D.add_(change[U])


class _Sums(NamedTuple):
    """The sums AᵀA and AᵀE that `correct` needs. A holds the inputs of the map, and a column of ones if the map has a
    bias; E holds what its output lacks."""

    gram: Tensor
    products: Tensor
    size: float = 0.0
    """‖E‖²"""

    def plus(self, *others: Self) -> Self:
        gram, products, size = self
        for other in others:
            gram, products, size = gram + other.gram, products + other.products, size + other.size
        return type(self)(gram, products, size)

    def seen_from(self, directions: int) -> Self:
        """Return the sums for this number of random directions of the outputs, if there are more outputs."""
        D = self.products.shape[1]
        if directions >= D:
            return self
        draw = torch.randn(D, directions, generator=torch.Generator().manual_seed(0), dtype=torch.double)
        return self._replace(products=self.products @ draw.to(self.products))

    def solved(self, ridge: float, num_weights: int) -> Tensor:
        """Return the change of the map for this ridge as one matrix: V for the weight and, if the map has a bias, c as
        the last row."""
        gram = self.gram.clone()
        of_weights = gram.diagonal()[:num_weights]  # a view
        of_weights += ridge * of_weights.sum() / max(1, num_weights)
        root, failed = torch.linalg.cholesky_ex(gram)
        if ridge > 0 and not failed:
            return torch.cholesky_solve(self.products, root)
        return torch.linalg.pinv(gram, hermitian=True) @ self.products

    def error(self, change: Tensor) -> float:
        """Return the squared error of this change of the map, ‖A V + c − E‖² in `correct`, without the constant term
        ‖E‖²."""
        return float((change * (self.gram @ change - 2 * self.products)).sum())
