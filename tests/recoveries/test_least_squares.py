"""The correction of a linear map against torch's own least squares."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from mhaprune.recoveries.refitting import correct


def problem(tokens: int, inputs: int) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, 3).double()
    read = torch.randn(tokens, inputs).double() * torch.arange(1, inputs + 1) + 2.0
    return linear, read, torch.randn(tokens, 3).double() + 5.0


@torch.no_grad()
def reference(linear: nn.Linear, read: Tensor, wanted: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """The ridge as rows of its own: sqrt(strength) · W should be sqrt(strength) · W_old."""
    inputs = linear.in_features
    strength = (ridge * read.square().sum(dim=0).mean()).sqrt()
    rows = torch.cat([strength * torch.eye(inputs).double(), torch.zeros(inputs, 1).double()], dim=1)
    left = torch.cat([torch.cat([read, torch.ones(len(read), 1).double()], dim=1), rows])
    right = torch.cat([wanted, strength * linear.weight.T])
    solution = torch.linalg.lstsq(left, right).solution
    return solution[:-1].T, solution[-1]


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.5])
@torch.no_grad()
def test_it_is_least_squares_with_the_ridge_around_the_old_weights(ridge: float) -> None:
    linear, read, wanted = problem(40, 5)
    weight, bias = reference(linear, read, wanted, ridge)
    parts = [(read[some], (wanted - linear(read))[some]) for some in (slice(0, 7), slice(7, 40))]
    correct(linear.weight, linear.bias, parts, ridge)
    torch.testing.assert_close(linear.weight, nn.Parameter(weight))
    torch.testing.assert_close(linear.bias, nn.Parameter(bias))


@torch.no_grad()
def test_what_lacks_nothing_is_not_changed() -> None:
    linear, read, _ = problem(40, 5)
    before = copy.deepcopy(linear.state_dict())
    correct(linear.weight, linear.bias, [(read, torch.zeros(40, 3))], 1e-3)
    assert all(torch.equal(value, before[name]) for name, value in linear.state_dict().items())


@torch.no_grad()
def test_without_inputs_the_bias_takes_the_mean() -> None:
    linear, (_, read, missing) = nn.Linear(1, 3).double(), problem(40, 0 + 1)
    linear.weight, linear.in_features = nn.Parameter(linear.weight[:, :0]), 0
    before = linear.bias.clone()
    correct(linear.weight, linear.bias, [(read[:, :0], missing)], 1e-3)
    torch.testing.assert_close(linear.bias - before, missing.mean(dim=0))


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
