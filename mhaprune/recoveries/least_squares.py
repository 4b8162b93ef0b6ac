"""A linear map fitted anew in closed form.

Dimensions: T = tokens, W = inputs of the map, D = outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def correct(weight_DW: Tensor, bias_D: Tensor | None, parts: Iterable[tuple[Tensor, Tensor]], ridge: float) -> None:
    """Change a map, in place, by the V (W, D) and c (D,) that best add to its output what that lacks. A map without a
    bias gets no c.

    Each part is A, what the map reads (T, W), and E, what its output lacks (T, D). V and c minimise, over all parts,

        ‖A V + c − E‖² + ridge · mean(diag AᵀA) · ‖V‖²

    They solve the normal equations in float64, so only sums over the parts are kept. Forming AᵀA squares the condition
    number, which float64 affords for inputs in float32. If the equations leave a choice, V and c are the smallest: with
    no ridge and fewer tokens than inputs, for example.
    """
    D, W = weight_DW.shape
    unknowns = W if bias_D is None else W + 1
    gram = weight_DW.new_zeros(unknowns, unknowns, dtype=torch.float64)
    products = gram.new_zeros(unknowns, D)
    for inputs_TW, missing_TD in parts:
        inputs = F.pad(inputs_TW.double(), (0, unknowns - W), value=1.0)  # a last column for the bias
        gram += inputs.T @ inputs
        products += inputs.T @ missing_TD.double()
    of_weights = gram.diagonal()[:W]  # a view
    of_weights += ridge * of_weights.sum() / max(1, W)
    change = torch.linalg.pinv(gram, hermitian=True) @ products
    weight_DW.add_(change[:W].T)
    if bias_D is not None:
        bias_D.add_(change[W])
