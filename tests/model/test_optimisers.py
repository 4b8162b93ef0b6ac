"""Stacks of parameters, and Muon on them, against one parameter at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from mhaprune.model.training import NEWTON_SCHULZ, Muon, orthogonal, stacked

SHAPES = ((6, 6), (9, 4), (6, 6), (5,), (4, 9), (9, 4), (0, 4), (2, 2), (2, 2), (2, 2))


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def loss_of(weights: list[nn.Parameter], wanted: list[Tensor]) -> Tensor:
    return sum(((a - b) ** 2).sum() for a, b in zip(weights, wanted, strict=True))  # type: ignore[return-value]


def test_a_stack_holds_the_parameters_of_one_shape() -> None:
    plain = parameters()
    before = [weight.detach().clone() for weight in plain]
    stacks = stacked(plain)
    assert [tuple(stack.shape) for stack in stacks] == [(2, 6, 6), (2, 9, 4), (1, 5), (1, 4, 9), (1, 0, 4), (3, 2, 2)]
    for weight, value in zip(plain, before, strict=True):
        assert torch.equal(weight, value)
    loss_of(plain, [torch.zeros_like(value) for value in before]).backward()
    for stack in stacks:
        assert stack.grad is not None
        torch.testing.assert_close(stack.grad, 2 * stack.detach())
        stack.data.add_(1.0)
    for weight, value in zip(plain, before, strict=True):
        torch.testing.assert_close(weight.detach(), value + 1)


def test_parameters_of_different_precision_are_not_stacked() -> None:
    assert len(stacked([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, dtype=torch.float64))])) == 2


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_a_step_on_stacks_is_muon_on_each_matrix(weight_decay: float) -> None:
    """Against the published update written out for one matrix."""
    ours = [weight for weight in parameters() if weight.dim() == 2]
    twins = copy.deepcopy(ours)
    averages = [torch.zeros_like(weight) for weight in twins]
    wanted = [torch.randn_like(weight) for weight in ours]
    optimiser = Muon(stacked(ours), lr=0.05, weight_decay=weight_decay)
    for _ in range(3):
        optimiser.zero_grad(set_to_none=False)
        loss_of(ours, wanted).backward()
        optimiser.step()
        for twin, average, target in zip(twins, averages, wanted, strict=True):
            if not twin.numel():
                continue
            gradient = 2 * (twin.detach() - target)
            average.mul_(0.95).add_(0.05 * gradient)
            update = iterated(0.05 * gradient + 0.95 * average)
            twin.data = twin.data * (1 - 0.05 * weight_decay) - 0.05 * 0.2 * max(twin.shape) ** 0.5 * update
    for weight, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(weight.detach(), twin.detach())


def iterated(matrix: Tensor) -> Tensor:
    a, b, c = NEWTON_SCHULZ
    x = matrix / matrix.norm()
    for _ in range(5):
        x = a * x + b * x @ x.mT @ x + c * x @ x.mT @ x @ x.mT @ x
    return x


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_that_of_torch_up_to_its_bfloat16() -> None:
    # Of the smallest matrices bfloat16 may lose the lesser direction altogether.
    ours = [weight for weight in parameters(torch.float32) if weight.dim() == 2 and weight.numel() > 4]
    twins = copy.deepcopy(ours)
    start = copy.deepcopy(ours)
    wanted = [torch.randn_like(weight) for weight in ours]
    mine = Muon(stacked(ours), lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon(twins, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for weights, optimiser in ((ours, mine), (twins, theirs)):
            optimiser.zero_grad(set_to_none=False)
            loss_of(weights, wanted).backward()
            optimiser.step()
    for weight, twin, first in ((x.detach() for x in three) for three in zip(ours, twins, start, strict=True)):
        moved = (twin - first).norm()
        assert float((weight - twin).norm() / moved) < 0.02
        assert float(moved) > 0.1


def test_no_gradient_is_no_update() -> None:
    assert torch.equal(orthogonal(torch.zeros(2, 3, 3)), torch.zeros(2, 3, 3))
