"""The exercise of the course (d2l.ai, 11.5, exercise 2) as students solve it: each head times a learned number."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhaprune
from support.own_layers import GONE, HEADS, WIDTH, Layer, Net, apart, check, check_refit, closed, made, wrapped
from support.sizes import slow


def gates(heads: int = HEADS) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 2, heads).view(1, heads, 1, 1))


class Gated(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.head_weight = gates()

    def gate(self) -> Tensor:
        """The factors of the heads, (1, H, 1, 1)."""
        return self.head_weight

    def through(self, x: Tensor) -> Tensor:
        return x * self.gate()


class Softmax(Gated):
    def gate(self) -> Tensor:
        return self.head_weight.softmax(dim=1)


class MeanOne(Gated):
    def gate(self) -> Tensor:
        return torch.softmax(self.head_weight, 1) * self.num_heads


class Sigmoid(Gated):
    def gate(self) -> Tensor:
        return torch.sigmoid(self.head_weight)


class Shares(Gated):
    def gate(self) -> Tensor:
        return self.head_weight.exp() / (1 + self.head_weight.exp().sum())


class Hard(Gated):
    """A gate that is 0 for some heads, which then have no effect."""

    def gate(self) -> Tensor:
        return self.head_weight.relu()


class Largest(Gated):
    """All but the two largest factors are 0, also when fewer heads are left."""

    def gate(self) -> Tensor:
        gate = self.head_weight.sigmoid()
        return gate * (gate >= gate.flatten().topk(min(2, gate.numel())).values[-1])


class InFloat32(Gated):
    """Computed in float32, whatever the model computes in."""

    def gate(self) -> Tensor:
        return self.head_weight.float().softmax(1).to(self.head_weight.dtype)


class Folded(Softmax):
    """The factors are repeated for each example, and multiply heads that are folded into the examples."""

    def through(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, *x.shape[2:])
        every = self.gate().reshape(self.num_heads).repeat(x.shape[0])
        return (flat * every[:, None, None]).view_as(x)


class Vector(Gated):
    """A vector of gates, joined by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.head_weight = nn.Parameter(torch.linspace(-1, 2, HEADS))

    def gate(self) -> Tensor:
        return self.head_weight.softmax(-1).view(1, -1, 1, 1)

    def through(self, x: Tensor) -> Tensor:
        return torch.einsum("bhtk,h->bhtk", x, self.head_weight.softmax(-1))


class Joined(Gated):
    """The factors are spread over the columns of the joined heads, in a layer that calls no bmm."""

    def gate(self) -> Tensor:
        return nn.functional.softmax(self.head_weight, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.num_heads, -1)) for each in (self.W_q, self.W_k, self.W_v))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        said = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
        return self.W_o(said * self.gate().flatten().repeat_interleave(said.shape[-1] // self.num_heads))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = gates()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.logits.softmax(1)


class Inside(Layer):
    """The gates belong to a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def gate(self) -> Tensor:
        return self.scale.logits.softmax(1)

    def through(self, x: Tensor) -> Tensor:
        return self.scale(x)


class Products(nn.Module):
    """The inner module of the attention in Dive into Deep Learning."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.attention_weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5, dim=-1)
        return torch.bmm(self.attention_weights, v)


class Outer(Softmax):
    """Attention is computed in a module of its own, and the gates are outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Products()

    def forward(self, x: Tensor) -> Tensor:
        said = self.attention(self.fold(self.W_q(x)), self.fold(self.W_k(x)), self.fold(self.W_v(x)))
        said = self.through(said.reshape(-1, self.num_heads, *said.shape[1:])).permute(0, 2, 1, 3)
        return self.W_o(said.reshape(said.shape[0], said.shape[1], -1))


class OuterRaw(Outer):
    def gate(self) -> Tensor:
        return self.head_weight


class OnWeights(Softmax):
    """The factors multiply the attention weights."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        weights = (q @ k.mT).softmax(-1) * self.gate()
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


class Literal(Layer):
    """The view of the factors names the number of all heads, which is no attribute of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.linspace(-1, 2, HEADS))

    def gate(self) -> Tensor:
        return torch.tanh(self.factors)

    def through(self, x: Tensor) -> Tensor:
        return x * self.gate().view(1, 4, 1, 1)


class OnWeightsRaw(OnWeights):
    def gate(self) -> Tensor:
        return self.head_weight


class OnFolded(Softmax):
    """The factors multiply the weights of heads that are folded into the examples."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fold(self.W_q(x)), self.fold(self.W_k(x)), self.fold(self.W_v(x))
        weights = (q @ k.mT).softmax(-1) * self.gate().flatten().repeat(len(x))[:, None, None]
        said = torch.bmm(weights, v).unflatten(0, (-1, self.num_heads))
        return self.W_o(said.transpose(1, 2).flatten(2))


class OnValues(Softmax):
    """The factors multiply the values."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = nn.functional.scaled_dot_product_attention(q, k, v * self.gate())
        return self.W_o(said.transpose(1, 2).flatten(2))


class WithNeurons(OnValues):
    """The layer has an MLP, too."""

    def __init__(self) -> None:
        super().__init__()
        self.W_1, self.W_2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.W_2(self.W_1(x).relu())


class HandedIn(Layer):
    """The model holds the gates of all layers, and hands each layer a row of them."""

    given: Tensor

    def forward(self, x: Tensor, row: Tensor | None = None) -> Tensor:
        self.row = row
        out = super().forward(x)
        del self.row
        return out

    def through(self, x: Tensor) -> Tensor:
        return x * self.factors(self.row)

    @staticmethod
    def factors(row: Any) -> Tensor:
        return row.softmax(-1).view(1, -1, 1, 1)


class Rows(Net):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(layer)
        self.gates = nn.Parameter(torch.linspace(-1, 2, 2 * HEADS).view(2, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for n, layer in enumerate(self.layers):
            y = y + layer(y, self.gates[n])
        return self.end(y.mean(1))


KINDS = [
    *(Softmax, Sigmoid, Folded, OnWeights, Literal),
    *slow(Gated, Outer, InFloat32),
    *slow(MeanOne, Shares, Vector, Joined, Inside, OuterRaw, OnWeightsRaw, OnFolded, OnValues),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_gates_of_its_own_loses_heads_and_the_others_count_as_before(kind: Any, tmp_path: Path) -> None:
    model, heads, small = check(kind, tmp_path)
    right = torch.cat([layer.gate().flatten() for layer in model.layers])  # type: ignore[operator]
    assert torch.allclose(torch.tensor(heads.score("gate")["score"].tolist()), right.detach().float(), atol=1e-6)
    layer: Any = small.layers[0]  # type: ignore[index]
    assert type(layer) is kind, "the class is the user's own"
    assert layer.gate().numel() == HEADS - len(GONE[0]), "the gates of removed heads are gone"
    again = wrapped(small)
    assert (
        apart(again.prune(mask={0: [0]}), closed(model, ["layers.0.W_o", "layers.1.W_o"], {0: [0, 1, 3], 1: [0]}))
        < 1e-9
    )


def test_gates_are_found_in_a_layer_that_has_neurons_too() -> None:
    model = made(WithNeurons).double()
    heads = wrapped(model, units=("head", "neuron"))
    gone = {f"layers.{n}": which for n, which in GONE.items()}
    assert apart(heads.prune(mask=gone), closed(model, ["layers.0.W_o", "layers.1.W_o"])) < 1e-9


class OfTheCourse(nn.Module):
    """The project's own layer, whose projections are joined to one product."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = mhaprune.MultiHeadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Mixed(Net):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(layer)
        self.layers[0] = OfTheCourse()


def test_gates_are_found_beside_layers_that_have_none() -> None:
    model = made(OnValues, Mixed).double()
    small = wrapped(model).prune(mask={1: [1, 3]})
    assert apart(small, closed(model, ["", "layers.1.W_o"], {1: [1, 3]})) < 1e-9


class OneProduct(Net):
    """Both layers compute attention in one module."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(layer)
        first, second = self.layers
        second.attention = first.attention


def test_gates_are_found_in_two_layers_that_share_the_module_of_attention(tmp_path: Path) -> None:
    check(Outer, tmp_path, net=OneProduct)


def test_gates_that_the_model_hands_to_its_layers_are_cut_at_the_call(tmp_path: Path) -> None:
    check(HandedIn, tmp_path, net=Rows)


@pytest.mark.parametrize("kind", [Hard, Largest])
def test_a_head_whose_gate_is_0_has_no_effect_and_goes(kind: Any) -> None:
    model: Any = made(kind)
    with torch.no_grad():
        for layer in model.layers:
            layer.head_weight.copy_(torch.tensor([-1.0, 0.5, -2.0, 1.0]).view(1, -1, 1, 1))
    heads = wrapped(model)
    assert "4 without effect" in repr(heads)
    small: Any = heads.prune(mask={0: [0, 2], 1: [0, 2]})
    assert apart(small, model) < 1e-6
    assert small.layers[0].head_weight.numel() == 2


def test_a_layer_without_learned_numbers_has_no_gates() -> None:
    class Half(Layer):
        def through(self, x: Tensor) -> Tensor:
            return x * 0.5

    class Shifted(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(1, HEADS, 1, 1))

        def through(self, x: Tensor) -> Tensor:
            return x + self.shift

    class Normed(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH // HEADS)

        def through(self, x: Tensor) -> Tensor:
            return self.norm(x)

    class Temperature(Gated):
        """One number per head, which the attention weights depend on."""

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
            return self.W_o(((q @ k.mT * self.head_weight).softmax(-1) @ v).transpose(1, 2).flatten(2))

    for kind in (Half, Shifted, Normed, Temperature):
        heads = wrapped(made(kind))
        assert not any(block.gated_by_layer for block in heads.subject.blocks), kind
        with pytest.raises(ValueError, match="needs learned gates"):
            heads.score("gate")


def test_a_refit_is_no_worse_and_training_goes_on_with_the_gates_that_are_left() -> None:
    heads = wrapped(made(Softmax))
    check_refit(heads)
    small: Any = heads.prune(mask=GONE)
    small(torch.ones(1, 3, dtype=torch.long)).sum().backward()
    assert small.layers[0].head_weight.grad.abs().sum() > 0


class TiedOut(Net):
    """W_O of both layers is one weight."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(layer)
        first, second = self.layers
        second.W_o.weight = first.W_o.weight  # type: ignore[union-attr]


def test_one_w_o_of_two_layers_makes_up_for_both_factors_or_for_none() -> None:
    gone = {0: [1], 1: [1]}
    model: Any = made(Softmax, TiedOut).double()
    with pytest.raises(ValueError, match=r"layers.0.W_o and layers.1.W_o: are one weight, but their factors change"):
        wrapped(model).prune(mask=gone)
    with torch.no_grad():
        model.layers[1].head_weight.copy_(model.layers[0].head_weight)
    heads = wrapped(model)
    for copy in (True, False):
        small: Any = heads.without(gone, copy=copy).model
        assert apart(small, closed(model, ["layers.0.W_o", "layers.1.W_o"], {0: [1]})) < 1e-9
    assert small.layers[0].W_o.weight.shape == (WIDTH, WIDTH - WIDTH // HEADS)


class AboveMean(Gated):
    """With one head left, the factor is 0."""

    def gate(self) -> Tensor:
        return self.head_weight - self.head_weight.mean()


def test_what_w_o_cannot_make_up_for_is_refused() -> None:
    heads = wrapped(made(AboveMean))
    heads.prune(mask=GONE)
    with pytest.raises(ValueError, match="layers.0: its own factor of a head is 0 when other heads are gone"):
        heads.prune(mask={0: [0, 1, 2]})


class ByLength(Gated):
    """The factor depends on the number of positions."""

    def through(self, x: Tensor) -> Tensor:
        return x * (self.head_weight / x.shape[2]).sigmoid()


class Twice(Net):
    """One layer is called twice, with other factors."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(layer)
        self.layers[1] = self.layers[0]
        self.gates = nn.Parameter(torch.linspace(-1, 2, 2 * HEADS).view(2, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for n in range(2):
            y = y + self.layers[n](y, self.gates[n])
        return self.end(y.mean(1))


class HandedRaw(HandedIn):
    @staticmethod
    def factors(row: Any) -> Tensor:
        return row.view(1, -1, 1, 1)


class FromALinear(Gated):
    """The factors are the output of a linear module without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.made_by = nn.Linear(1, HEADS)

    def gate(self) -> Tensor:
        return self.made_by(torch.ones(1, dtype=self.made_by.weight.dtype)).view(1, -1, 1, 1)


@pytest.mark.parametrize(("kind", "net"), [(ByLength, Net), (HandedRaw, Twice), (FromALinear, Net)])
def test_factors_that_change_between_inputs_or_calls_are_no_gates(kind: Any, net: Any) -> None:
    model = made(kind, net).double()
    heads = wrapped(model)
    with pytest.raises(ValueError, match="needs learned gates, one number per head for all inputs"):
        heads.score("gate")
    with heads.closed({0: [1, 3]}) as gated:
        assert apart(gated, closed(model, ["layers.0.W_o"], {0: [1, 3]})) < 1e-9


def test_weights_with_a_factor_are_shown_without_it() -> None:
    heads = wrapped(made(OnWeights))
    [seen, _] = heads.subject.attention_maps(next(iter(heads.splits["score"].batches(6)))).values()
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(seen.weights.shape[:-1]))
