"""Layers that multiply by parameters of their own, which are no linear modules."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhaprune
from mhaprune.surgery.bare_weights import with_linear_parameters
from support.own_layers import GONE, HEADS, WIDTH, Net, apart, batches, call, called, made, wrapped
from support.sizes import slow

K = WIDTH // HEADS


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.3 * torch.randn(*shape))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class Matrices(nn.Module):
    """`x @ W + b`, with the numbers of heads as literals."""

    out = "Wo"

    def __init__(self) -> None:
        super().__init__()
        self.Wq, self.bq, self.Wk, self.Wv, self.Wo = (
            drawn(*s) for s in ((WIDTH, WIDTH), (WIDTH,), *3 * [(WIDTH,) * 2])
        )

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.times(x, self.Wq) + self.bq, self.times(x, self.Wk), self.times(x, self.Wv)
        said = attend(*(each.view(B, T, HEADS, K).transpose(1, 2) for each in (q, k, v)))
        return self.times(said.transpose(1, 2).reshape(B, T, WIDTH), self.Wo)


class ByEinsum(Matrices):
    """With the weight as the first factor."""

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("io, bti -> bto", weight, x)


class ByAddmm(Matrices):
    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.addmm(x.new_zeros(1), x.flatten(0, 1), weight).view(*x.shape[:2], -1)


class Linear(nn.Module):
    """A linear layer of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = drawn(WIDTH, WIDTH), drawn(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OwnLinear(nn.Module):
    out = "o.weight"

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (Linear() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (made(x).unflatten(-1, (-1, K)).transpose(1, 2) for made in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).transpose(1, 2).flatten(2))


class ByHead(nn.Module):
    """Each weight with a dimension of heads, as in TransformerLens."""

    out = "W_O"

    def __init__(self) -> None:
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (drawn(HEADS, WIDTH, K) for _ in range(3))
        self.W_O, self.b_Q, self.b_O = drawn(HEADS, K, WIDTH), drawn(HEADS, K), drawn(WIDTH)

    def made(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("btd,hdk->bhtk", x, weight)

    def joined(self, said: Tensor) -> Tensor:
        return torch.einsum("...htk,hkd->...td", said, self.W_O) + self.b_O

    def forward(self, x: Tensor) -> Tensor:
        q = self.made(x, self.W_Q) + self.b_Q[:, None]
        return self.joined(attend(q, self.made(x, self.W_K), self.made(x, self.W_V)))


class Broadcast(ByHead):
    def made(self, x: Tensor, weight: Tensor) -> Tensor:
        return x[:, None] @ weight


class Rearranged(ByHead):
    """As TransformerLens computes."""

    def made(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.permute(0, 2, 1).reshape(-1, WIDTH)).unflatten(-1, (-1, K)).transpose(1, 2)

    def joined(self, said: Tensor) -> Tensor:
        weight = self.W_O.permute(2, 0, 1).reshape(WIDTH, -1)
        return F.linear(said.transpose(1, 2).flatten(2), weight, self.b_O)


class Grouped(Rearranged):
    """Two heads share keys and values, which have a bias and are repeated by a number of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.W_K, self.W_V, self.b_K = drawn(2, WIDTH, K), drawn(2, WIDTH, K), drawn(2, K)
        self.repeat_kv_heads = 2

    def forward(self, x: Tensor) -> Tensor:
        k = F.linear(x, self.W_K.permute(0, 2, 1).reshape(-1, WIDTH), self.b_K.reshape(-1))
        k, v = k.unflatten(-1, (-1, K)).transpose(1, 2), self.made(x, self.W_V)
        k, v = (torch.repeat_interleave(each, self.repeat_kv_heads, dim=1) for each in (k, v))
        return self.joined(attend(self.made(x, self.W_Q) + self.b_Q[:, None], k, v))


class WidthFirst(ByHead):
    """As in Flax."""

    def __init__(self) -> None:
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (drawn(WIDTH, HEADS, K) for _ in range(3))

    def made(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("btd,dhk->bhtk", x, weight)


class Chunked(nn.Module):
    """One weight and one bias for queries, keys and values, cut apart before they are used."""

    out = "o"

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b, self.o = drawn(3 * WIDTH, WIDTH), drawn(3 * WIDTH), drawn(WIDTH, WIDTH)

    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [F.linear(x, w, b) for w, b in zip(self.w.chunk(3), self.b.chunk(3), strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, K)).transpose(1, 2) for each in self.three(x))
        return F.linear(attend(q, k, v).transpose(1, 2).flatten(2), self.o)


class Columns(Chunked):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = drawn(WIDTH, 3 * WIDTH), drawn(1)

    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [x @ w for w in self.w.split(self.w.shape[1] // 3, dim=1)]


class Stacked(Chunked):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = drawn(3, HEADS, WIDTH, K), drawn(3, HEADS, K)

    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [(torch.einsum("btd,hdk->bthk", x, self.w[n]) + self.b[n]).flatten(2) for n in range(3)]


class StackedOnce(Stacked):
    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [each.flatten(2) for each in torch.einsum("btd,nhdk->nbthk", x, self.w)]


class ByFunction(nn.Module):
    """`F.multi_head_attention_forward` with parameters of the layer."""

    out = "w_out"

    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.b_in, self.w_out, self.b_out = (
            drawn(*s) for s in ((3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        more: Any = (self.w_in, self.b_in, None, None, False, 0.0, self.w_out, self.b_out, self.training)
        return F.multi_head_attention_forward(y, y, y, WIDTH, HEADS, *more)[0].transpose(0, 1)


class Gated(Matrices):
    """The exercise: each head times its part of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = drawn(1, HEADS, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.times(x, each).unflatten(-1, (-1, K)).transpose(1, 2) for each in (self.Wq, self.Wk, self.Wv))
        said = attend(q, k, v) * self.gate.softmax(dim=1)
        return self.times(said.transpose(1, 2).flatten(2), self.Wo)


class Unbound(Chunked):
    def __init__(self) -> None:
        super().__init__()
        self.w = drawn(3, WIDTH, WIDTH)

    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [x @ w for w in self.w.unbind()]


class Reversed(Chunked):
    """The biases do not stand in the order of the weights."""

    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [F.linear(x, w, b) for w, b in zip(self.w.chunk(3), self.b.chunk(3)[::-1], strict=True)]


class BiasAgain(nn.Module):
    """Biases that are used elsewhere too, and twice."""

    out = "o"

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (drawn(WIDTH, WIDTH) for _ in range(4))
        self.b, self.c = drawn(WIDTH), drawn(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.q, self.c), F.linear(x, self.k), F.linear(x, self.v, self.c)
        said = attend(*(each.unflatten(-1, (-1, K)).transpose(1, 2) for each in (q, k, v))).transpose(1, 2).flatten(2)
        return F.linear(said, self.o, 2 * self.b) + F.linear(said, self.o, self.b) + self.b.tanh()


class Mixed(nn.Module):
    """A linear module reads what parameters have made, beside one of another class."""

    out = "o.weight"

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight) + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.w, self.k, self.o = drawn(2, WIDTH, WIDTH), self.Own(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x @ self.w[0], self.k(x), x @ self.w[1]
        said = attend(*(each.unflatten(-1, (-1, K)).transpose(1, 2) for each in (q, k, v)))
        return self.o(said.transpose(1, 2).flatten(2))


KINDS = [
    *(Matrices, OwnLinear, Rearranged, Grouped, Chunked, BiasAgain, StackedOnce, ByFunction, Mixed, Gated),
    *slow(ByEinsum, ByAddmm, ByHead, Broadcast, WidthFirst, Columns, Stacked, Unbound, Reversed),
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


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_removed_from_parameters_and_the_class_runs_as_it_is_written(kind: Any, tmp_path: Path) -> None:
    model = made(kind).double()
    before = copy.deepcopy(model.state_dict())
    heads = wrapped(model)
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
    model = made(kind).double()
    heads = wrapped(model)
    found = heads.score("ablation").sort_index()["score"].tolist()
    data = batches()

    def loss(of: nn.Module) -> Tensor:
        with torch.no_grad():
            logits = torch.cat([call(of, batch) for batch in data])
        return F.cross_entropy(logits, torch.cat([batch["labels"] for batch in data]))

    by_hand = [float(loss(shut(model, kind, {n: [h]})) - loss(model)) for n in range(2) for h in range(HEADS)]
    assert torch.allclose(torch.tensor(found), torch.tensor(by_hand), atol=1e-6)


def test_the_gate_of_the_exercise_is_read() -> None:
    model: Any = made(Gated)
    scores = wrapped(model).score("gate").sort_index()["score"].tolist()
    gates = torch.cat([layer.gate.detach().softmax(dim=1).flatten() for layer in model.layers])
    assert torch.allclose(torch.tensor(scores), gates, atol=1e-6)


def test_a_layer_without_heads_and_a_refit_are_exact_too(tmp_path: Path) -> None:
    model = made(ByHead).double()
    heads = wrapped(model)
    small = heads.prune(mask={0: [0, 1, 2, 3]})
    assert apart(small, shut(model, ByHead, {0: [0, 1, 2, 3]})) < 1e-12
    mhaprune.save(small, tmp_path)
    assert apart(small, mhaprune.load(tmp_path, model=made(ByHead, seed=5).double())) == 0
    assert repr(wrapped(small)) == "4 heads in 2 blocks, all with an effect, all removable"
    plain, fitted = (heads.prune(mask=GONE, refit=refit) for refit in (False, True))

    @torch.no_grad()
    def error(small: nn.Module) -> float:
        return sum(float((call(small, batch) - call(model, batch)).square().sum()) for batch in batches())

    assert error(fitted) < error(plain)


def test_a_copy_is_exported_as_it_is_written(tmp_path: Path) -> None:
    small = wrapped(made(Rearranged)).prune(mask=GONE)
    assert mhaprune.export(small, tmp_path / "small.pt2", (batches()[0]["x"],)) < 1e-5


class WithNeurons(ByHead):
    def __init__(self) -> None:
        super().__init__()
        self.W_in, self.b_in, self.W_out = drawn(WIDTH, 24), drawn(24), drawn(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + super().forward(x)
        return x + (x @ self.W_in + self.b_in).relu() @ self.W_out


def test_neurons_between_parameters_are_cut_and_read_again(tmp_path: Path) -> None:
    model = made(WithNeurons).double()
    heads = wrapped(model, units=("head", "neuron"))
    assert repr(heads).startswith("56 units in 4 blocks")
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

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.c

    model = made(Biased, Alone)
    plain, fitted = (wrapped(model).prune(mask=GONE, refit=refit) for refit in (False, True))
    assert apart(fitted, model) < apart(plain, model)
