"""A linear map fitted anew in closed form.

Dimensions: T = tokens, W = inputs of the map, D = outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def correct(linear: nn.Linear, parts: Iterable[tuple[Tensor, Tensor]], ridge: float) -> None:
    """Change a map, in place, by the V (W, D) and c (D,) that best add to its output what that lacks.

    Each part is A, what the map reads (T, W), and E, what its output lacks (T, D). V and c minimise, over all parts,

        ‖A V + c − E‖² + ridge · mean(diag AᵀA) · ‖V‖²

    They solve the normal equations in float64, so only sums over the parts are kept. Forming AᵀA squares the condition
    number, which float64 affords for inputs in float32. If the equations leave a choice, V and c are the smallest: with
    no ridge and fewer tokens than inputs, for example.
    """
    unknowns = linear.in_features + 1
    gram = linear.weight.new_zeros(unknowns, unknowns, dtype=torch.float64)
    products = gram.new_zeros(unknowns, linear.out_features)
    for inputs_TW, missing_TD in parts:
        inputs = F.pad(inputs_TW.double(), (0, 1), value=1.0)  # the last column is that of the bias
        gram += inputs.T @ inputs
        products += inputs.T @ missing_TD.double()
    of_weights = gram.diagonal()[:-1]  # a view
    of_weights += ridge * of_weights.sum() / max(1, linear.in_features)
    change = torch.linalg.pinv(gram, hermitian=True) @ products
    linear.weight.add_(change[:-1].T)
    linear.bias.add_(change[-1])
