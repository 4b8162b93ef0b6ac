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

Module = TypeVar("Module", bound=nn.Module)


def with_relevance(model: Module, epsilon: float) -> Module:
    """Return a copy of the model with the same outputs, in which gradient × input is relevance. The model itself is not
    changed."""
    model = copy.deepcopy(model)
    for path, module in model.named_modules():
        # The copied layers become layers of another class, with the same parameters.
        if isinstance(module, nn.LayerNorm):
            module.__class__ = _NormByConstant
        elif isinstance(module, nn.Linear) and path.endswith((".q_proj", ".k_proj")):
            module.__class__ = _Constant
        elif isinstance(module, nn.Linear):
            module.__class__ = _EpsilonRule
            module.epsilon = epsilon  # type: ignore[assignment]
    return model


class _Constant(nn.Linear):
    """A linear map for queries or keys, without gradient: attention weights count as constants."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class _EpsilonRule(nn.Linear):
    """A linear map with the ε-rule: its gradient is scaled by z / (z + ε sign z), its output is unchanged."""

    epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        share = (z / (z + self.epsilon * torch.where(z < 0, -1.0, 1.0))).nan_to_num().detach()
        return z * share + (z * (1 - share)).detach()


class _NormByConstant(nn.LayerNorm):
    """A layer normalisation in which the spread that it divides by counts as a constant."""

    def forward(self, x: Tensor) -> Tensor:
        spread = (x.var(dim=-1, keepdim=True, correction=0) + self.eps).sqrt().detach()
        return (x - x.mean(dim=-1, keepdim=True)) / spread * self.weight + self.bias
