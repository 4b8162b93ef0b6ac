"""Copies of a network, and networks that were pruned, down to their memory."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhaprune.attention.gates import Softmax
from mhaprune.heads import HeadMask
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.surgery.copying import alone, copied


@pytest.mark.parametrize("encoder_layers", [0, 2])
def test_a_copy_is_the_same_module_and_shares_nothing(encoder_layers: int) -> None:
    model = Seq2Seq(Transformer(d_model=8, num_heads=2, num_encoder_layers=encoder_layers), 11, Softmax())
    state = torch.get_rng_state()
    copy = model.copied()
    assert torch.equal(torch.get_rng_state(), state)
    assert repr(copy) == repr(model)
    assert {id(module) for module in model.modules()}.isdisjoint(id(module) for module in copy.modules())
    assert copy.output.weight is copy.target_embedding.weight
    mine, other = model.state_dict(), copy.state_dict()
    assert list(mine) == list(other)
    for name in mine:
        assert torch.equal(mine[name], other[name])
        assert mine[name].data_ptr() != other[name].data_ptr()


def test_what_is_left_is_built_like_a_network_without_those_heads() -> None:
    """Down to the memory of its weights, so that neither is faster to run."""
    model = Seq2Seq(Transformer(d_model=12, num_heads=3), 11, Softmax())
    mask = HeadMask(model.grid, frozenset(head for n, head in enumerate(model.grid) if n % 3 < n // 5))
    left, built = model.without(mask), Seq2Seq(model.config, 11, None, model.grid.without(mask.removed))
    assert set(left.grid.sizes) == {0, 1, 2, 3}
    assert left.grid == built.grid
    assert repr(left) == repr(built)
    for (name, mine), (other, theirs) in zip(left.state_dict().items(), built.state_dict().items(), strict=True):
        assert (name, mine.shape, mine.stride()) == (other, theirs.shape, theirs.stride())
        assert mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    for mine, theirs in zip(left.modules(), built.modules(), strict=True):
        assert vars(mine).keys() - {"mhaprune"} == vars(theirs).keys()  # the note of what it lost


def test_a_copy_of_a_layer_that_stands_twice_stands_twice() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4)] * 2)
    copy = copied(model)
    assert copy[0] is copy[1]
    assert copy[0] is not model[0]
    assert torch.equal(copy[0].weight, model[0].weight)


def test_what_cannot_be_copied_is_shared() -> None:
    layer = nn.Linear(4, 4)
    layer.lock = threading.Lock()  # type: ignore[assignment]
    copy: Any = copied(layer)
    assert copy.lock is layer.lock
    assert copy.weight is not layer.weight


class Held(nn.Module):
    """A layer whose part is called through a function that was made in `__init__`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)
        part, weight = self.part, self.part.weight
        inner = lambda x: part(x)  # noqa: E731

        def itself(x: Tensor, depth: int = 0) -> Tensor:
            return part(x) if depth else itself(x, 1)

        self.calls = {
            "closure": lambda x: part(x),
            "default": lambda x, part=part: part(x),
            "named default": lambda x, *, part=part: part(x),
            "closure in a closure": lambda x: inner(x),
            "itself": itself,
            "weight": lambda x: nn.functional.linear(x, weight),
            "list": lambda x, parts=[part]: parts[0](x),
            "partial": partial(lambda f, x: f(x), inner),
            "self": lambda x: self.part(x),
            "method": self.part.forward,
        }[how]

    def forward(self, x: Tensor) -> Tensor:
        return self.calls(x)


HOW = ["closure", "default", "named default", "closure in a closure", "itself", "weight", "list", "partial", "self"]


@pytest.mark.parametrize("how", [*HOW, "method"])
def test_a_function_that_holds_a_part_holds_its_copy_in_a_copy(how: str) -> None:
    model, x = nn.Sequential(Held(how)), torch.randn(2, 3)
    before = model(x)
    twin: Any = copied(model)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        twin[0].part.weight.zero_()
    assert not torch.equal(twin(x), before), "the copy computes with its own weights"
    assert torch.equal(model(x), before), "and the model with its own"
    shared: Any = copied(model, {id(each): each for each in model.parameters()})
    assert shared[0].part.weight is model[0].part.weight  # type: ignore[union-attr]


def test_a_function_that_holds_nothing_of_the_model_stays_the_same() -> None:
    model = Held("closure")
    model.calls = torch.relu
    model.other = plain = lambda x: x
    assert copied(model).other is plain


PARTS: list[nn.Module] = []


def test_a_part_that_only_a_global_variable_reaches_is_named() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(3, 3)
            PARTS[:] = [self.part]

        def forward(self, x: Tensor) -> Tensor:
            return PARTS[0](x)

    model = nn.Sequential(Layer())
    twin = copied(model)
    with pytest.raises(ValueError, match=r"^0.part: is called through .*global variable"), alone(twin, model):
        twin(torch.ones(1, 3))
    with alone(twin, model):
        twin[0].part(torch.ones(1, 3))
