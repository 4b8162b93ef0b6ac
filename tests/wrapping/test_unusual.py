"""Modules that do what few do, which scores and a refit meet."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhaprune
from mhaprune.scorers.prediction import Prediction

WIDTH, HEADS = 16, 4
X = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """One layer of attention and a linear map, with a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o, self.after = (nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.attend(x))
        after: Tensor = self.after(x)
        return x + after


class InWindows(Net):
    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x.reshape(-1, 3, WIDTH)).reshape(*x.shape[:2], -1)


class InFiveDimensions(Net):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k, v = (each.unflatten(2, (2, 3)) for each in (q, k, v))  # windows, after the heads
        return ((q @ k.mT).softmax(-1) @ v).flatten(2, 3).transpose(1, 2).flatten(2)


class Router(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.argmax(dim=-1)


class Routed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.after = Router(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.attend(x))
        return x + self.after(x)[0]


class OnlyForward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        raise NotImplementedError("no derivative here")


class WithoutGradient(Net):
    def attend(self, x: Tensor) -> Tensor:
        result: Tensor = OnlyForward.apply(super().attend(x))
        return result


def wrapped(net: nn.Module) -> Any:
    return mhaprune.wrap(net.eval(), lambda output, batch: output.square().mean(dim=(1, 2)), score=[X])


@pytest.mark.parametrize("score", ["confidence", "entropy"])
def test_weights_of_windows_are_none_of_whole_examples(score: str) -> None:
    heads = wrapped(InWindows())
    with pytest.raises(ValueError, match=f"scorer={score}: needs attention weights of whole examples, .*; leave it"):
        heads.score(score)
    assert heads.prune(mask={0: [1]}).num_heads == 3


def test_products_of_five_dimensions_are_not_found_and_the_message_does_not_deny_them() -> None:
    with pytest.raises(ValueError, match="no attention found: .* or by matmul of four dimensions"):
        wrapped(InFiveDimensions())


def test_a_linear_module_that_returns_a_tuple_ends_no_sublayer() -> None:
    heads = wrapped(Routed())
    small = heads.prune(mask={0: [1]}, refit=True)
    assert not torch.equal(small.o.weight, heads.prune(mask={0: [1]}).o.weight)
    assert torch.equal(small.after.weight, heads.subject.model.after.weight)


def test_heads_that_always_say_the_same_are_predicted() -> None:
    """The variance of these 68 equal numbers comes out below 0, by rounding."""
    says = torch.zeros(1, HEADS, 68, 4)
    says[:, 0, :, :2] = 0.09245976
    subject: Any = SimpleNamespace(
        queries=lambda batch: {"block": torch.ones(1, 68, dtype=torch.bool)},
        head_outputs=lambda batch: {"block": says},
        output_weights=lambda: {"block": torch.zeros(HEADS, 4, WIDTH)},
    )
    examples: Any = SimpleNamespace(batches=lambda size: [None])
    missed = Prediction.fit(subject, examples, ridge=1e-3).missed(subject.head_outputs(None))
    assert missed["block"].abs().max() < 1e-6


def test_a_model_without_gradients_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"model: its gradients cannot be traced \(NotImplementedError: no derivative"):
        wrapped(WithoutGradient())
