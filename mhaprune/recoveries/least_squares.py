"""A linear map fitted anew in closed form.

Dimensions: T = tokens, W = inputs of the map, D = outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

HELD_OUT = 5
"""Every fifth part decides between several ridges, beginning with the second."""


@torch.no_grad()
def correct(
    weight_DW: Tensor, bias_D: Tensor | None, parts: Iterable[tuple[Tensor, Tensor]], ridge: float | Sequence[float]
) -> None:
    """Change a map, in place, by the V (W, D) and c (D,) that best add to its output what that lacks. A map without a
    bias gets no c.

    Each part is A, what the map reads (T, W), and E, what its output lacks (T, D). V and c minimise, over all parts,

        ‖A V + c − E‖² + ridge · mean(diag AᵀA) · ‖V‖²

    They solve the normal equations in float64, so only sums over the parts are kept. Forming AᵀA squares the condition
    number, which float64 affords for inputs in float32. If the equations leave a choice, V and c are the smallest: with
    no ridge and fewer tokens than inputs, for example.

    Several ridges are tried on most of the parts. The one that fits the other parts best then fits all of them. If
    there is only one part, the largest ridge is taken.
    """
    D, W = weight_DW.shape
    unknowns = W if bias_D is None else W + 1
    nothing = _Sums(weight_DW.new_zeros(unknowns, unknowns).double(), weight_DW.new_zeros(unknowns, D).double())
    ridges = [ridge] if isinstance(ridge, int | float) else list(ridge)
    most, held = nothing, nothing
    for i, (inputs_TW, missing_TD) in enumerate(parts):
        inputs = F.pad(inputs_TW.double(), (0, unknowns - W), value=1.0)  # a last column for the bias
        sums = _Sums(inputs.T @ inputs, inputs.T @ missing_TD.double())
        if len(ridges) > 1 and i % HELD_OUT == 1:
            held = held.plus(sums)
        else:
            most = most.plus(sums)
    best = max(ridges)
    if held is not nothing:
        best = min(ridges, key=lambda each: held.error(most.solved(each, W)))
    change = most.plus(held).solved(best, W)
    weight_DW.add_(change[:W].T)
    if bias_D is not None:
        bias_D.add_(change[W])


class _Sums(NamedTuple):
    """AᵀA and AᵀE, with the column of the bias in A."""

    gram: Tensor
    products: Tensor

    def plus(self, other: Self) -> Self:
        return type(self)(self.gram + other.gram, self.products + other.products)

    def solved(self, ridge: float, num_weights: int) -> Tensor:
        """V with c as its last row."""
        gram = self.gram.clone()
        of_weights = gram.diagonal()[:num_weights]  # a view
        of_weights += ridge * of_weights.sum() / max(1, num_weights)
        root, failed = torch.linalg.cholesky_ex(gram)
        if ridge > 0 and not failed:
            return torch.cholesky_solve(self.products, root)
        return torch.linalg.pinv(gram, hermitian=True) @ self.products

    def error(self, change: Tensor) -> float:
        """‖A V + c − E‖² but for what no V changes."""
        return float((change * (self.gram @ change - 2 * self.products)).sum())
