"""Layer-wise relevance propagation as an ordinary backward pass.

A copy of the model has its linear layers and normalisations replaced. Its outputs are the same, but its gradients are
such that gradient × input is relevance. So one `backward` call suffices, and no rule per layer has to be carried
through the network by hand.

The ε-rule sends the relevance R_j of an output z_j = Σ_i x_i w_ij + b_j to its inputs as x_i w_ij R_j / (z_j + ε sign
z_j) (Bach et al. 2015, equation 58). Where relevance is written as value times gradient, that is an ordinary gradient
times z / (z + ε sign z). Attention weights and the spread that a layer normalisation divides by count as constants.
So from layer to layer only biases and ε take relevance away (Ali et al. 2022).
"""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from mhaprune.attention.layer import MultiHeadAttention

Module = TypeVar("Module", bound=nn.Module)


def with_relevance(model: Module, epsilon: float) -> Module:
    """Return a copy with the same outputs, whose gradients are relevance; the model itself is not changed."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(parent, name, _NormByConstant(child))
            elif (
                isinstance(child, nn.Linear) and isinstance(parent, MultiHeadAttention) and name in ("q_proj", "k_proj")
            ):
                setattr(parent, name, _Constant(child))
            elif isinstance(child, nn.Linear):
                setattr(parent, name, _EpsilonRule(child, epsilon))
    return model


class _SameLinear(nn.Linear):
    """A linear map that shares the parameters of another."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def reset_parameters(self) -> None:
        """Does nothing: the parameters are those of another layer."""


class _Constant(_SameLinear):
    """Queries and keys, which receive no relevance: attention weights count as constants."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class _EpsilonRule(_SameLinear):
    """A linear map with the ε-rule: its gradient is scaled by z / (z + ε sign z), its output is unchanged."""

    def __init__(self, linear: nn.Linear, epsilon: float) -> None:
        super().__init__(linear)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        share = (z / (z + self.epsilon * torch.where(z < 0, -1.0, 1.0))).nan_to_num().detach()
        return z * share + (z * (1 - share)).detach()


class _NormByConstant(nn.LayerNorm):
    """A layer normalisation in which the spread that it divides by counts as a constant."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__(norm.normalized_shape, norm.eps, device="meta")
        self.weight, self.bias = norm.weight, norm.bias

    def reset_parameters(self) -> None:
        """Does nothing: the parameters are those of another layer."""

    def forward(self, x: Tensor) -> Tensor:
        spread = (x.var(dim=-1, keepdim=True, correction=0) + self.eps).sqrt().detach()
        return (x - x.mean(dim=-1, keepdim=True)) / spread * self.weight + self.bias
