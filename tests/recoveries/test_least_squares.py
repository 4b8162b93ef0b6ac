"""The correction of a linear map where the data leave a choice; test_refit has it against torch's least squares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mhaprune.recoveries.refitting import correct


def problem(tokens: int, inputs: int) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, 3).double()
    read = torch.randn(tokens, inputs).double() * torch.arange(1, inputs + 1) + 2.0
    return linear, read, torch.randn(tokens, 3).double() + 5.0


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
@torch.no_grad()
def test_fewer_tokens_than_inputs_leave_the_rest_as_it_was(ridge: float) -> None:
    linear, read, wanted = problem(3, 8)
    before = linear.weight.clone()
    correct(linear.weight, linear.bias, [(read, wanted - linear(read))], ridge)
    change = linear.weight - before
    assert 0 < change.abs().max() < 10
    unseen = torch.linalg.svd(torch.cat([read, torch.ones(3, 1).double()], dim=1)).Vh[3:, :-1]
    assert unseen.abs().max() > 0.1
    if ridge == 0:
        torch.testing.assert_close(linear(read), wanted)
    assert torch.linalg.matrix_rank(change) <= 3


@torch.no_grad()
def test_of_several_ridges_the_one_that_holds_elsewhere_is_taken() -> None:
    """Noise is best left alone, and what is so in all parts is best followed."""
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(8, 3, generator=draw).double()
    for noise, expected in ((100.0, 100.0), (0.0, 1e-3)):
        read = [torch.randn(10, 8, generator=draw).double() for _ in range(5)]
        parts = [(A, A @ truth + noise * torch.randn(10, 3, generator=draw).double()) for A in read]
        chosen, told = (torch.zeros(3, 8).double() for _ in range(2))
        correct(chosen, None, parts, [1e-3, 1.0, 100.0])
        correct(told, None, parts, expected)
        torch.testing.assert_close(chosen, told)


@torch.no_grad()
def test_with_nothing_to_choose_by_the_largest_ridge_is_taken() -> None:
    _, read, missing = problem(20, 4)
    weights = [torch.zeros(3, 4).double() for _ in range(2)]
    for weight, ridge in zip(weights, ([1e-3, 10.0], 10.0), strict=True):
        correct(weight, None, [(read, missing)], ridge)
    torch.testing.assert_close(*weights)
