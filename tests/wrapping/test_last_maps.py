"""The walk from map to map against whole passes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mhaprune.wrapping.replay import Map, find_maps, walk


class Counted(nn.Linear):
    computed = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.computed += 1
        return super().forward(x)


class Layer(nn.Module):
    """x + W_2 relu(W_1 norm(x)), then the same with one map alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.out = nn.LayerNorm(4), Counted(4, 6), nn.Linear(6, 4)
        self.last_norm, self.last = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.first(self.norm(x)).relu())
        y: Tensor = x + self.last(self.last_norm(x))
        return y


class Stack(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()] * 3 if shared else (Layer() for _ in range(3)))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.norm(x)
        return y


def whole_pass(model: nn.Module, each: Map, x: Tensor) -> list[Tensor]:
    """What a map read and what stood in the stream when the call of its reader came, in a pass to the end."""
    read: list[Tensor] = []
    found: list[list[Tensor]] = []
    assert each.reader is not None
    hooks = [
        model.get_submodule(each.path).register_forward_pre_hook(lambda module, inputs: read.append(inputs[0])),
        model.get_submodule(each.reader).register_forward_pre_hook(
            lambda module, inputs: found.append([*read[-1:], inputs[0]])
        ),
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return found[each.call]


@pytest.mark.parametrize("shared", [False, True])
@torch.no_grad()
def test_maps_that_change_on_the_way_decide_what_follows(shared: bool) -> None:
    torch.manual_seed(0)
    model = Stack(shared).double()
    plain, xs = copy.deepcopy(model), [torch.randn(5, 4).double(), torch.randn(2, 4).double()]
    maps = find_maps(model, [], partial(model, xs[0][:1]))
    assert [each.path for each in maps] == [
        f"layers.{i}.{name}" for i in range(1 if shared else 3) for name in ("out", "last")
    ]
    Counted.computed = computed = 0
    for each, parts in walk(model, maps, [partial(model, x) for x in xs]):
        computed, Counted.computed = computed + Counted.computed, 0
        for part, x in zip(parts, xs, strict=True):
            for one, other in zip(part, whole_pass(plain, each, x), strict=True):
                assert torch.equal(one, other)
        Counted.computed = 0
        for one in (model, plain):
            weight = one.get_submodule(each.path).weight
            assert isinstance(weight, Tensor)
            weight.add_(1.0)
    assert computed == (2 if shared else 1) * 3 * len(xs), "all maps together cost one pass if no layer is shared"
