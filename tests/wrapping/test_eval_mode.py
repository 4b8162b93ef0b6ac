"""A model is at rest while its heads are looked at, and as it was before afterwards."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhaprune.hooks.eval_mode import aside, at_rest


class Kept(nn.Linear):
    """A module that keeps what it said."""

    def forward(self, x: Tensor) -> Tensor:
        self.said = super().forward(x)
        return self.said


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(Kept(3, 3), nn.Dropout())


def as_before(model: Any) -> bool:
    return model.training and model[1].training and model[0].weight.requires_grad and not hasattr(model[0], "said")


def test_a_pass_within_others_leaves_the_model_at_rest(model: nn.Module) -> None:
    with at_rest(model):
        for _ in range(2):
            with at_rest(model):
                model(torch.ones(1, 3, requires_grad=True))
            assert not model.training
            assert not any(weight.requires_grad for weight in model.parameters())
    assert as_before(model)


def test_gradients_within_a_pass_without_them_are_none_of_weights(model: nn.Module) -> None:
    with torch.no_grad(), at_rest(model):
        assert all(weight.requires_grad for weight in model.parameters())
        with torch.enable_grad(), at_rest(model):
            assert not any(weight.requires_grad for weight in model.parameters())
        assert not model.training
    assert as_before(model)


def test_a_pass_that_fails_leaves_nothing_behind(model: nn.Module) -> None:
    def fail() -> None:
        with at_rest(model):
            model(torch.ones(1, 3, requires_grad=True))
            assert not model.training, "also after one that has failed"
            raise RuntimeError("stop")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="stop"):
            fail()
        assert as_before(model)


def test_what_is_looked_at_aside_is_seen_by_no_mode() -> None:
    seen: list[Any] = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing():
        assert aside(torch.add)(torch.ones(1), 1) == 2
        assert torch.add not in seen
        torch.add(torch.ones(1), 1)
    assert torch.add in seen
