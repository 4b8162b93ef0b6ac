"""Layers in which heads share tensors, and what may stand between scores, heads and W_O."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhaprune
from mhaprune.discovery.attention import discover
from mhaprune.discovery.found import Found, completed
from mhaprune.discovery.layouts import columns_of_heads
from mhaprune.hooks.blocks import Rows
from mhaprune.surgery.removal import held_weights
from support.own_layers import HEADS, WIDTH, Layer, apart, by_head, called, check, closed, made, wrapped

K = WIDTH // HEADS
GROUP = {0: [0, 1]}
"""The heads of a key-value head."""


class SharedCache(Layer):
    """Keys and values that two heads share have a factor for each, and are kept in plain attributes, as in Meta's
    Llama. A factor of the values is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep = HEADS, HEADS // 2, 2
        del self.num_heads
        self.W_k, self.W_v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(self.n_kv_heads, K))
        self.register_buffer("twice", torch.tensor([[1.0], [2.0]]), persistent=False)
        self.keys, self.values = (torch.zeros(6, 12, self.n_kv_heads, K, dtype=torch.double) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.W_q(x).view(B, T, self.n_heads, K)
        k, v = (f(x).view(B, T, self.n_kv_heads, K) for f in (self.W_k, self.W_v))
        self.keys, self.values = self.keys.to(x), self.values.to(x)
        self.keys[:B, :T], self.values[:B, :T] = self.scaled(k, v)
        k, v = (each[:B, :T, :, None].expand(-1, -1, -1, self.n_rep, -1) for each in (self.keys, self.values))
        q, k, v = (y.reshape(B, T, self.n_heads, K).transpose(1, 2) for y in (q, k, v))
        return self.W_o(self.through((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def scaled(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k * self.norm, v * self.twice


class SharedGates(SharedCache):
    """The outputs of the heads have factors of their own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.ones(HEADS, 1, 1))

    def through(self, x: Tensor) -> Tensor:
        return x * self.gates


class SharedNorms(SharedCache):
    """Modules of torch that count the features of key-value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.over, self.near = nn.BatchNorm1d(WIDTH // 2), nn.Conv1d(WIDTH // 2, WIDTH // 2, 3, 1, 1, 1, WIDTH // 2)

    def scaled(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (f(y.flatten(2).mT).mT.unflatten(-1, (-1, K)) for f, y in ((self.over, k), (self.near, v)))
        return k, v


class Convolved(Layer):
    """A norm over the batch and an activation stand between the heads and W_O, and scores of positions, by vectors that
    all heads share, come last, as in bottleneck transformers (Srinivas et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.places = nn.Parameter(torch.zeros(12, K))
        self.slopes = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        far = torch.arange(x.shape[1]).to(x) - torch.arange(x.shape[1])[:, None]
        of_places = torch.einsum("bhid,jd->bhij", q, self.places[: x.shape[1]])
        said = ((q @ k.mT + self.slopes * far + of_places).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.W_o(self.norm(said.mT).mT.relu())


class OneValue(Layer):
    """Each head has keys of its own, but all have the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.W_v = nn.Linear(WIDTH, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).unflatten(-1, (self.num_heads, -1)) for f in (self.W_q, self.W_k))
        weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
        return self.W_o(torch.einsum("bhij,bjd->bihd", weights, self.W_v(x)).flatten(2))


class Gated(Layer):
    """A linear map of the text makes one gate for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        said = ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2) * self.gate(x).sigmoid()[..., None]
        return self.W_o(said.flatten(2))


class OverPlaces(Layer):
    """A norm over the positions, whose sum over them never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        said = ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.W_o(self.norm(said.mT).mT)


class WithSink(Layer):
    """A learned sink takes a part of the weights, as in gpt-oss."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def weigh(self, scores: Tensor) -> Tensor:
        sinks = self.sinks[:, None, None].expand(len(scores), -1, scores.shape[-1], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        return self.W_o((self.weigh(q @ k.mT / 2) @ v).transpose(1, 2).flatten(2))


class SeesNothing(WithSink):
    """The first token sees none, so its weights are zeros."""

    def weigh(self, scores: Tensor) -> Tensor:
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(-1)
        return scores.masked_fill(~later, -torch.inf).softmax(-1).nan_to_num()


class Outside(nn.Module):
    """The same, with the norm, W_O and factors that are not saved in a module around that of the heads."""

    def __init__(self) -> None:
        super().__init__()
        inner = Convolved()
        self.norm, self.W_o = inner.norm, inner.W_o
        inner.norm, inner.W_o = nn.Identity(), nn.Identity()  # type: ignore[assignment]
        self.inner = inner
        self.register_buffer("factors", 1.0 + torch.arange(HEADS)[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        said = (self.inner(x).unflatten(-1, (-1, K)) * self.factors).flatten(2)
        return self.W_o(self.norm(said.mT).mT.relu())


KINDS = [SharedCache, SharedGates, SharedNorms, Convolved, OneValue, Gated, OverPlaces, WithSink, SeesNothing, Outside]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_removed_exactly(kind: Any, tmp_path: Path) -> None:
    check(kind, tmp_path)


def test_factors_of_shared_values_are_a_part_of_each_gate() -> None:
    model: Any = made(SharedGates)
    scores = wrapped(model).score("gate").sort_index()["score"]
    twice = torch.tensor([1.0, 1.0, 2.0, 2.0])
    expected = torch.cat([layer.gates.flatten() * twice for layer in model.layers]).abs()
    assert scores.tolist() == pytest.approx(expected.tolist())


def test_weights_of_key_value_heads_count_for_each_head_that_reads_them() -> None:
    model: Any = made(SharedCache).double()
    heads = wrapped(model)
    gone = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in heads.prune(mask=GROUP).parameters())
    assert float(held_weights(model, heads.subject.blocks[0])[:2].sum()) == gone


@pytest.mark.filterwarnings("ignore:prune. the model has .* weights now")
@pytest.mark.parametrize("first", [{0: [1], 1: [0, 1]}, {0: [0], 1: [3]}])
def test_what_key_value_heads_keep_is_read_again_after_two_removals(first: Any, tmp_path: Path) -> None:
    model = made(SharedCache).double()
    small = wrapped(model).prune(mask=first)
    smaller = wrapped(small).prune(mask={0: [3], 1: [2]})
    gone = {layer: [*heads, 3 - layer] for layer, heads in first.items()}
    assert apart(smaller, closed(model, ["layers.0.W_o", "layers.1.W_o"], gone)) < 1e-9
    mhaprune.save(smaller, tmp_path)
    assert apart(mhaprune.load(tmp_path, model=made(SharedCache, seed=5).double()), smaller) == 0


class MadeInCalls(SharedCache):
    """A call makes the factors of all key-value heads anew if they are missing."""

    def scaled(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.twice is None or not len(self.twice):
            self.twice = torch.tensor([[1.0], [2.0]]).to(v)
        return super().scaled(k, v)


def test_factors_of_key_value_heads_that_a_call_makes_are_named() -> None:
    heads = wrapped(made(MadeInCalls).double())
    assert repr(heads).endswith(
        "none removable: layers.0: layers.0.twice is made in calls or by eval(), for all its heads"
    )


class Saturated(Layer):
    """An activation after the heads is flat, whatever they say."""

    def through(self, x: Tensor) -> Tensor:
        return (1e6 * x).sigmoid()


def test_heads_behind_what_is_flat_are_not_said_to_have_no_effect() -> None:
    with pytest.raises(
        ValueError, match=r"layers\.0 \(Saturated\): no input of W_O changes with its heads here"
    ) as why:
        wrapped(made(Saturated))
    assert "\n" not in str(why.value)


def test_columns_of_w_o_are_those_that_any_trace_has_shown() -> None:
    heads = torch.ones(1, 3, 2, 2, requires_grad=True)  # (B, T, H, K)
    seen = heads.flatten(2) * torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert columns_of_heads(seen, heads, heads_last=True) == (((0,), (2, 3)), False)
    assert columns_of_heads(seen, heads, True, known=((1,), (2,))) == (((0, 1), (2, 3)), True)


def test_what_only_the_first_trace_has_shown_beside_the_roles_is_kept() -> None:
    """Where a softmax of other numbers has no gradient."""
    layer, rows = nn.Identity(), {name: Rows(name, ((0,), (1,))) for name in ("a", "b")}
    first = Found(
        layer, 2, (0, 1), {"query": rows["a"], "key": rows["b"], "score of b": rows["b"]}, numbers=[("n", -1)]
    )
    for known, expected in (({"query": rows["a"]}, ["query", "score of b"]), ({"c": rows["b"]}, ["c"])):
        now = Found(layer, 2, (0, 1), {**known})
        completed([now], [first])
        assert ([*now.rows], now.numbers) == (expected, [("n", -1)])
    other = Found(nn.Identity(), 2, (0, 1))
    completed([other], [first])
    assert not other.rows


class Mixed(Layer):
    """Talking heads (Shazeer et al. 2020): each head's weights are mixed from those of all. One query reads all."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Parameter(torch.eye(HEADS)) for _ in range(2))

    def mix(self, x: Tensor, maps: Tensor) -> Tensor:
        return torch.einsum("bhij,hg->bgij", x, maps)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        weights = self.mix(self.mix(q[:, :, :1] @ k.mT, self.before).softmax(-1), self.after)
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


class MixedByMaps(Mixed):
    def mix(self, x: Tensor, maps: Tensor) -> Tensor:
        return nn.functional.linear(x.permute(0, 2, 3, 1), maps.abs()).permute(0, 3, 1, 2)


@pytest.mark.parametrize("kind", [Mixed, MixedByMaps])
def test_weights_that_are_mixed_from_those_of_several_heads_are_of_none(kind: Any) -> None:
    model = made(kind)
    with pytest.raises(ValueError, match=r"layers\.0, layers\.1: weighs positions in another way") as refused:
        wrapped(model)
    hint = str(refused.value).partition("for example: blocks=")[2]
    assert hint.startswith(f'[AttentionBlock(path, out="W_o", heads={HEADS}, query=')
    assert '"layers.0", "layers.1"' in hint
    heads = wrapped(model, blocks=eval(hint, {**vars(mhaprune.hooks.blocks)}))
    assert repr(heads).startswith(f"{2 * HEADS} heads in 2 blocks, all with an effect")


class Experts(nn.Module):
    """Experts with small activations, none below 0, and a router."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.end = nn.Linear(WIDTH, HEADS), nn.Linear(HEADS * WIDTH, WIDTH)
        sizes = ((WIDTH, width), (width, WIDTH))
        self.first, self.second = (nn.Parameter(torch.zeros(HEADS, *size)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = 1e-3 * torch.einsum("btd,edf->betf", x, self.first).relu()
        shares = self.router(x).softmax(-1)
        said = torch.einsum("betf,efd->betd", hidden, self.second)
        return self.end((said * shares.mT[..., None]).transpose(1, 2).flatten(2))


class BesideExperts(nn.Module):
    """Experts with more and with fewer numbers than the attention weights, which are no heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = Layer(), nn.ModuleList(map(Experts, (12, 3)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x)
        return y + sum(each(x) for each in self.experts)


def test_experts_with_small_activations_are_no_heads() -> None:
    blocks, overlooked = discover(called(made(BesideExperts)))
    assert [block.path for block in blocks] == ["layers.0.attention", "layers.1.attention"]
    assert not overlooked
