"""Optimisers over stacks: parameters of one shape are slices of one tensor, so a step makes few calls.

A small transformer has a hundred parameters of a dozen shapes, and an optimiser that takes them one by one spends more
time on calls than on numbers.

Dimensions: P = parameters of one shape, R = rows, C = columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The coefficients of Jordan et al. 2024. Five steps bring all singular values between about 0.7 and 1.2."""


def stacked(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """One tensor (P, *shape) for each shape. Parameters and gradients become slices of it and of its gradient.

    A step on the stacks is a step on the parameters. `unstack` gives each parameter memory of its own again.
    """
    by_shape: dict[tuple[torch.Size, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_shape.setdefault((parameter.shape, parameter.dtype), []).append(parameter)
    return [_stack(alike) for alike in by_shape.values()]


def unstack(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `stacked`: memory of its own for each parameter, and no gradient."""
    for parameter in parameters:
        parameter.data, parameter.grad = parameter.data.clone(), None


class Muon(Optimizer):
    """Momentum whose update of a matrix is made orthogonal (Jordan et al. 2024), for stacks of matrices (P, R, C).

    All matrices of a stack go through the Newton-Schulz iteration together. The learning rate is scaled by
    0.2·√max(R, C), so that an update is about as large as one of AdamW at the same rate (Liu et al. 2025). The weight
    decay is that of AdamW. One matrix at a time this is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, which
    iterates in bfloat16; here it is the precision of the parameters.
    """

    def __init__(
        self,
        stacks: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(stacks, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for stack in group["params"]:
                if stack.grad is None or not stack.numel():
                    continue
                average = self.state[stack].setdefault("momentum_buffer", torch.zeros_like(stack))
                average.lerp_(stack.grad, 1 - group["momentum"])
                update = orthogonal(torch.lerp(stack.grad, average, group["momentum"]))  # Nesterov's
                stack.mul_(1 - group["lr"] * group["weight_decay"])
                stack.sub_(update, alpha=group["lr"] * 0.2 * max(stack.shape[-2:]) ** 0.5)


def orthogonal(matrices_PRC: Tensor, steps: int = 5) -> Tensor:
    """U Vᵀ of each matrix U Σ Vᵀ, roughly, by a Newton-Schulz iteration of fifth degree."""
    a, b, c = NEWTON_SCHULZ
    wide = matrices_PRC.shape[-2] <= matrices_PRC.shape[-1]
    x = matrices_PRC if wide else matrices_PRC.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def _stack(alike: list[nn.Parameter]) -> nn.Parameter:
    stack = nn.Parameter(torch.stack([parameter.detach() for parameter in alike]))
    stack.grad = torch.zeros_like(stack)
    for parameter, values, gradient in zip(alike, stack.detach(), stack.grad, strict=True):
        parameter.data, parameter.grad = values, gradient
    return stack
