"""Layers that multiply by parameters of their own, which are no linear modules."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhaprune
from mhaprune.surgery.bare_weights import with_linear_parameters
from support.bare_weights import (
    BiasAgain,
    Broadcast,
    ByAddmm,
    ByEinsum,
    ByFunction,
    ByHead,
    Chunked,
    Columns,
    Gated,
    Grouped,
    K,
    Matrices,
    Mixed,
    OwnLinear,
    Packed,
    Partly,
    Rearranged,
    Reversed,
    Stacked,
    StackedOnce,
    Summed,
    Unbound,
    WidthFirst,
    WithLinear,
    drawn,
)
from support.own_layers import GONE, HEADS, WIDTH, Net, apart, batches, called, check_refit, loss, made, wrapped
from support.sizes import slow

KINDS = [
    *(Matrices, OwnLinear, Rearranged, Grouped, Partly, Packed, BiasAgain, StackedOnce, ByFunction, Gated, Summed),
    *slow(
        ByEinsum,
        ByAddmm,
        ByHead,
        Broadcast,
        WidthFirst,
        Chunked,
        Columns,
        Stacked,
        WithLinear,
        Unbound,
        Reversed,
        Mixed,
    ),
]


def shut(model: nn.Module, kind: Any, gone: Mapping[int, Sequence[int]] = GONE) -> nn.Module:
    """Return a copy in which W_O reads zeros from these heads."""
    model = copy.deepcopy(model)
    for layer, heads in gone.items():
        weight: Any = model.get_parameter(f"layers.{layer}.{kind.out}")
        by_input = weight.detach().flatten(0, 1) if weight.dim() == 3 else weight.detach()
        by_input = (
            by_input.T if kind in (OwnLinear, Mixed, ByFunction, BiasAgain) or issubclass(kind, Chunked) else by_input
        )
        for h in heads:
            by_input[h * K : (h + 1) * K] = 0
    return model


@cache
def proven(kind: Any) -> tuple[Net, mhaprune.Heads]:
    """Return a model of such layers, and its heads."""
    model = made(kind).double()
    return model, wrapped(model)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_removed_from_parameters_and_the_class_runs_as_it_is_written(kind: Any, tmp_path: Path) -> None:
    (model, heads), before = proven(kind), made(kind).double().state_dict()
    assert repr(heads) == "8 heads in 2 blocks, all with an effect, all removable"
    assert heads.proven.difference < 1e-12
    small: Any = heads.prune(mask=GONE)
    assert apart(small, shut(model, kind)) < 1e-12
    assert [*small.state_dict()] == [*before], "an optimiser's state is by place"
    left = sum(each.numel() for each in small.layers[0].parameters())
    assert left < 0.7 * sum(each.numel() for each in model.layers[0].parameters())
    around = {"sizes_of_heads", "called_maps"}  # for literal numbers, and a function that is computed step by step
    assert "forward" not in vars(small.layers[1]) or around & {*vars(small.layers[1])}
    mhaprune.save(small, tmp_path)
    assert apart(small, mhaprune.load(tmp_path, model=made(kind, seed=5).double())) == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    second = wrapped(small).prune(mask={0: [0], 1: [2]})
    assert apart(second, shut(model, kind, {0: [0, 1, 3], 1: [0, 2]})) < 1e-12
    mhaprune.save(second, tmp_path)
    assert apart(second, mhaprune.load(tmp_path, model=made(kind, seed=5).double())) == 0


@pytest.mark.parametrize("kind", [Matrices, Rearranged])
def test_ablation_and_gates_are_those_of_heads_closed_by_hand(kind: Any) -> None:
    model, heads = proven(kind)
    found = heads.score("ablation").sort_index()["score"].tolist()
    by_hand = [loss(shut(model, kind, {n: [h]})) - loss(model) for n in range(2) for h in range(HEADS)]
    assert torch.allclose(torch.tensor(found), torch.tensor(by_hand), atol=1e-6)


def test_the_gate_of_the_exercise_is_read() -> None:
    model, heads = proven(Gated)
    scores = heads.score("gate").sort_index()["score"].tolist()
    layers: Any = model.layers
    gates = torch.cat([layer.gate.detach().softmax(dim=1).flatten() for layer in layers])
    assert torch.allclose(torch.tensor(scores), gates.float(), atol=1e-6)


def test_a_layer_without_heads_and_a_refit_are_exact_too(tmp_path: Path) -> None:
    model, heads = proven(ByHead)
    small = heads.prune(mask={0: [0, 1, 2, 3]})
    assert apart(small, shut(model, ByHead, {0: [0, 1, 2, 3]})) < 1e-12
    mhaprune.save(small, tmp_path)
    assert apart(small, mhaprune.load(tmp_path, model=made(ByHead, seed=5).double())) == 0
    assert repr(wrapped(small)) == "4 heads in 2 blocks, all with an effect, all removable"
    check_refit(heads)


def test_a_copy_is_exported_as_it_is_written(tmp_path: Path) -> None:
    small = proven(Rearranged)[1].prune(mask=GONE)
    assert mhaprune.export(small, tmp_path / "small.pt2", (batches()[0]["x"],)) < 1e-5


class WithNeurons(ByHead):
    def __init__(self) -> None:
        super().__init__()
        self.W_in, self.b_in, self.W_out = drawn(WIDTH, 8), drawn(8), drawn(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + super().forward(x)
        return x + (x @ self.W_in + self.b_in).relu() @ self.W_out


def test_neurons_between_parameters_are_cut_and_read_again(tmp_path: Path) -> None:
    model = made(WithNeurons).double()
    heads = wrapped(model, units=("head", "neuron"))
    assert repr(heads).startswith("24 units in 4 blocks")
    assert repr(heads).endswith("all removable")
    for _ in range(2):
        small: Any = heads.prune(keep=0.5, by="surgeon")
        shapes = [getattr(small.layers[0], name).shape for name in ("W_in", "b_in", "W_out")]
        assert len({shapes[0][1], *shapes[1], shapes[2][0]}) == 1
        mhaprune.save(small, tmp_path)
        assert apart(small, mhaprune.load(tmp_path, model=made(WithNeurons, seed=5).double())) == 0
        heads = wrapped(small, units=("head", "neuron"))


class Scaled(Matrices):
    """The weights are computed in each call, so that none can be cut."""

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ (2 * weight)


def test_weights_that_are_computed_are_refused_in_one_line() -> None:
    with pytest.raises(
        ValueError, match=r"its heads are mixed before .* or a W_O that is no linear module\?"
    ) as refused:
        wrapped(made(Scaled))
    assert "\n" not in str(refused.value)


def test_a_model_without_such_weights_is_not_copied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    assert with_linear_parameters(replace(called(model), run=lambda model, _: model(torch.ones(2, 3)))) is model


def test_a_weight_that_other_layers_hold_too_stays() -> None:
    model: Any = made(OwnLinear)
    model.layers[1].q.weight = model.layers[0].q.weight
    twin: Any = with_linear_parameters(called(model))
    assert isinstance(twin.layers[0].q.weight, nn.Parameter)
    assert not hasattr(twin.layers[0].k, "weight")
    assert apart(twin, model) == 0


def test_a_weight_that_is_used_while_its_layer_does_not_run_stays() -> None:
    class Outside(Net):
        def forward(self, x: Tensor) -> Tensor:
            first: Any = self.layers[0]
            return super().forward(x) + (self.embed(x) @ first.Wo).mean(dim=(1, 2))[:, None]

    model = made(Matrices, Outside)
    twin: Any = with_linear_parameters(called(model))
    assert [isinstance(layer._parameters.get("Wo"), nn.Parameter) for layer in twin.layers] == [True, False]
    assert apart(twin, model) < 1e-6


def test_frozen_weights_stay_frozen() -> None:
    model: Any = made(Chunked)
    for frozen in (model.layers[0].w, model.layers[1].b):
        frozen.requires_grad_(False)
    heads = wrapped(model)
    maps: Any = heads.subject.model
    for n, (weight, bias) in enumerate([(False, True), (True, False)]):
        made_of = maps.layers[n].w_map_0
        assert (made_of.weight.requires_grad, made_of.bias.requires_grad) == (weight, bias)
    small: Any = heads.prune(mask=GONE)
    assert [[each.requires_grad for each in (layer.w, layer.b, layer.o)] for layer in small.layers] == [
        [False, True, True],
        [True, False, True],
    ]


@pytest.mark.parametrize("kind", [Matrices, ByHead])
def test_weights_that_changed_after_wrap_are_noticed(kind: Any) -> None:
    model: Any = made(kind)
    heads = wrapped(model)
    with torch.no_grad():
        next(iter(model.layers[0].parameters())).add_(1)
    with pytest.raises(ValueError, match="its weights have changed since wrap"):
        heads.prune(mask=GONE)


def test_a_name_that_is_taken_leaves_a_parameter_as_it_is() -> None:
    model: Any = made(Matrices)
    for layer in model.layers:
        layer.register_buffer("Wq_map", torch.ones(1))
    assert repr(wrapped(model)) == "8 heads in 2 blocks, all with an effect, all removable"


class Apart(ByHead):
    """Each head has a map of its own, and what they say is added."""

    def joined(self, said: Tensor) -> Tensor:
        return (said @ self.W_O).sum(dim=1)


def test_maps_of_single_heads_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="its heads are mixed before") as refused:
        wrapped(made(Apart))
    assert "\n" not in str(refused.value)


def test_a_refit_without_a_stream_keeps_the_bias() -> None:
    class Alone(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.embed(x)
            for layer in self.layers:
                y = layer(y)
            return self.end(y.mean(1))

    class Biased(Chunked):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Parameter(3 + torch.randn(WIDTH))

        def joined(self, said: Tensor) -> Tensor:
            return F.linear(said, self.o, self.c)

    model = made(Biased, Alone)
    plain, fitted = (wrapped(model).prune(mask=GONE, refit=refit) for refit in (False, True))
    assert apart(fitted, model) < apart(plain, model)
