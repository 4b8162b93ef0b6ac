"""Modules that do what few do, which scores and a refit meet."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhaprune.scorers.base import Scorer
from mhaprune.scorers.prediction import inverse_covariances
from mhaprune_literature.attention import Confidence, Entropy
from support.attention import HEADS, WIDTH, Attention, wrapped

SIX = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(0))


class InWindows(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, 3, WIDTH)).reshape(x.shape)


class InFiveDimensions(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (2, 3)) for each in (q, k, v))  # windows, after the heads
        return ((q @ k.mT).softmax(-1) @ v).flatten(2, 3)


class Router(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.argmax(dim=-1)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.router(x)[0]
        return out


class OnlyForward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        raise NotImplementedError("no derivative here")


class WithoutGradient(Attention):
    def after(self, context: Tensor) -> Tensor:
        result: Tensor = OnlyForward.apply(context)
        return result


@pytest.mark.parametrize("score", [Confidence(), Entropy()])
def test_weights_of_windows_are_none_of_whole_examples(score: Scorer) -> None:
    heads = wrapped(InWindows, x=SIX)
    with pytest.raises(ValueError, match="scorer=.*: needs attention weights of whole examples, .*; leave it"):
        heads.score(score)
    assert heads.prune(mask={0: [1]}).layers[0].num_heads == 3


def test_products_of_five_dimensions_are_those_of_heads_in_windows() -> None:
    heads = wrapped(InFiveDimensions, x=SIX)
    assert repr(heads) == "4 heads in 1 block, all with an effect, all removable"
    with pytest.raises(ValueError, match="scorer=.*: needs attention weights"):
        heads.score(Entropy())
    assert heads.prune(mask={0: [1]}).layers[0].num_heads == 3


def test_a_linear_module_that_returns_a_tuple_ends_no_sublayer() -> None:
    heads = wrapped(Attention, Routed)
    small = heads.prune(mask={0: [1]}, refit=True)
    assert not torch.equal(small.layers[0].o.weight, heads.prune(mask={0: [1]}).layers[0].o.weight)
    assert torch.equal(small.layers[1].router.weight, heads.subject.model.layers[1].router.weight)


def test_heads_that_always_say_the_same_have_an_inverse() -> None:
    """The variance of these 68 equal numbers comes out below 0, by rounding."""
    says = torch.zeros(1, HEADS, 68, 4)
    says[:, 0, :, :2] = 0.09245976
    subject: Any = SimpleNamespace(
        queries=lambda batch: {"block": torch.ones(1, 68, dtype=torch.bool)},
        head_outputs=lambda batch: {"block": says},
        output_weights=lambda: {"block": torch.zeros(HEADS, 4, WIDTH)},
    )
    examples: Any = SimpleNamespace(batches=lambda size: [None])
    [(_, (inverse, _))] = inverse_covariances(subject, examples, ridge=1e-3)
    assert inverse.isfinite().all()


def test_a_model_without_gradients_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"model: its gradients cannot be traced \(NotImplementedError: no derivative"):
        wrapped(WithoutGradient)
