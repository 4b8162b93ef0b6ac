"""Attention as well-known repositories write it, each in a few lines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhaprune
from mhaprune_literature.attention import Confidence
from support.own_layers import (
    HEADS,
    WIDTH,
    Layer,
    Net,
    apart,
    by_head,
    call,
    check,
    closed,
    effect,
    made,
    wrapped,
)

K = WIDTH // HEADS


class Core(nn.Module):
    """Attention alone, a part of a layer that has its maps and numbers."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / K**0.5).softmax(-1) @ v


class WithCore(Layer):
    """The layer counts its heads by a letter, as the BERT of codertimo."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.h, self.d_k = Core(), self.num_heads, K
        del self.num_heads

    def split(self, x: Tensor) -> list[Tensor]:
        return [f(x).view(len(x), -1, self.h, self.d_k).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v)]

    def forward(self, x: Tensor) -> Tensor:
        said = self.core(*self.split(x)).transpose(1, 2).contiguous()
        return self.W_o(said.view(len(x), -1, self.h * self.d_k))


class Memories(WithCore):
    """Each head also sees keys and values that it has learned, as in the diffusion models of lucidrains."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(2, HEADS, HEADS, K))

    def split(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().split(x)
        more = (each.expand(len(x), -1, -1, -1) for each in self.learned)
        return [q, *(torch.cat(both, dim=2) for both in zip(more, (k, v), strict=True))]


class OfInput(Layer):
    """A width that is computed from that of the input, and heads and examples in one dimension, as in former."""

    def forward(self, x: Tensor) -> Tensor:
        (B, T, D), h = x.shape, self.num_heads
        s = D // h
        q, k, v = (f(x).view(B, T, h, s) for f in (self.W_q, self.W_k, self.W_v))
        q, k, v = (each.transpose(1, 2).contiguous().view(B * h, T, s) for each in (q, k, v))
        said = torch.bmm((torch.bmm(q, k.mT) / s**0.5).softmax(2), v).view(B, h, T, s)
        return self.W_o(said.transpose(1, 2).contiguous().view(B, T, s * h))


class HeadsFirst(Layer):
    """Heads stand before examples in one dimension, by numbers that are written out."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (
            f(x).view(B, T, 4, 4).permute(2, 0, 1, 3).reshape(4 * B, T, 4) for f in (self.W_q, self.W_k, self.W_v)
        )
        said = torch.bmm((torch.bmm(q, k.mT) / 2).softmax(2), v).view(4, B, T, 4)
        return self.W_o(said.permute(1, 2, 0, 3).reshape(B, T, WIDTH))


@pytest.mark.parametrize("kind", [OfInput, HeadsFirst])
@torch.no_grad()
def test_examples_and_heads_of_one_dimension_are_told_apart_whatever_their_numbers(kind: Any) -> None:
    model = made(kind).double()
    small: Any = wrapped(model).prune(mask={0: [0, 1, 3], 1: [0, 2]})
    shut: Any = closed(model, ["layers.0.W_o", "layers.1.W_o"], {0: [0, 1, 3], 1: [0, 2]})
    for shape in ((HEADS, HEADS), (HEADS, 9), (2, HEADS), (HEADS // 2, HEADS // 2), (1, 1), (5, WIDTH), (HEADS, 1)):
        x = torch.randint(20, shape)
        assert (small(x) - shut(x)).abs().max() < 1e-9


class Relative(Layer):
    """Scores of content and of distance (Dai et al. 2019), the second one last, with keys that one map makes beside the
    values."""

    def __init__(self) -> None:
        super().__init__()
        self.W_kv, self.W_r = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.u, self.v = (nn.Parameter(torch.zeros(HEADS, K)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).to(x)
        r = self.W_r(torch.stack([places.sin(), places.cos()], dim=-1))
        q, k, v, r = (y.unflatten(-1, (self.num_heads, -1)) for y in (self.W_q(x), *self.W_kv(x).chunk(2, -1), r))
        of_content = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        weights = (of_content + torch.einsum("bihd,jhd->bhij", q + self.v, r)).softmax(-1)
        return self.W_o(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


class OfPlaces(Relative):
    """The model hands all layers one vector for each head and place."""

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        assert places is not None
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in (self.W_q(x), *self.W_kv(x).chunk(2, -1)))
        scores = torch.einsum("bihd,bjhd->bhij", q, k)
        weights = (scores + torch.einsum("bihd,hjd->bhij", q, places[:, : x.shape[1]])).softmax(-1)
        return self.W_o(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


class Places(Net):
    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.places = nn.Parameter(torch.zeros(HEADS, 12, K))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for layer in self.layers:
            y = y + layer(y, self.places)
        return self.end(y.mean(1))


def test_a_tensor_of_all_layers_is_cut_at_each_call(tmp_path: Path) -> None:
    model, *_ = check(OfPlaces, tmp_path, net=Places)
    assert len(model.get_parameter("places")) == HEADS


class RelativeValues(Layer):
    """Values of distances, which all heads share, are added to what each head says (Shaw et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.far = nn.Parameter(torch.zeros(2 * 12 + 1, K))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        places = torch.arange(x.shape[1])
        far = self.far[places[:, None] - places + 12]
        weights = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, far)).softmax(-1)
        said = self.both(weights @ v, torch.einsum("bhij,ijd->bhid", weights, far))
        return self.W_o(said.transpose(1, 2).flatten(2))

    def both(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other


class TwoWeights(Layer):
    """Each head has weights of positions too, and adds what both say."""

    def __init__(self) -> None:
        super().__init__()
        self.W_q2, self.W_k2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.share = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, *more = (
            f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f in (self.W_q, self.W_k, self.W_v, self.W_q2, self.W_k2)
        )
        said = self.both((q @ k.mT).softmax(-1), (more[0] @ more[1].mT).softmax(-1), v)
        return self.W_o(said.transpose(1, 2).flatten(2))

    def both(self, one: Tensor, other: Tensor, v: Tensor) -> Tensor:
        return one @ v + self.share * (other @ v)


class Difference(TwoWeights):
    """Differential attention (Ye et al. 2025): some weights are below 0."""

    def both(self, one: Tensor, other: Tensor, v: Tensor) -> Tensor:
        return (one - self.share * other) @ v


class Pairs(Layer):
    """Each pair of positions has a key and a value of its own, as in graph transformers; heads and examples share a
    dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.W_e = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        edges = x[:, :, None] * x[:, None]
        q, k, v, e = (
            y.unflatten(-1, (self.num_heads, -1)).movedim(-2, 1).flatten(0, 1)
            for y in (self.W_q(x), self.W_k(x), self.W_v(x), self.W_e(edges))
        )
        weights = torch.einsum("bid,bijd->bij", q, k[:, None] + e).softmax(-1)
        said = torch.einsum("bij,bijd->bid", weights, v[:, None] + e)
        return self.W_o(said.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2))


class OneQuery(Layer):
    """The last position asks, and all get the answer."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(y).unflatten(-1, (self.num_heads, -1)) for f, y in ((self.W_q, x[:, -1]), (self.W_k, x), (self.W_v, x))
        )
        weights = torch.einsum("bhd,bjhd->bhj", q, k).softmax(-1)
        return self.W_o(torch.einsum("bhj,bjhd->bhd", weights, v).flatten(1))[:, None].expand_as(x)


class TwoValues(RelativeValues):
    """They stand beside what each head says, as in the attention of AlphaFold to points."""

    def __init__(self) -> None:
        super().__init__()
        self.W_o = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def both(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.cat([one, other], dim=-1)


class Blocks(TwoValues):
    """The values of distances come after those of all heads."""

    def both(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.cat([one, other], dim=1)


class OwnValues(TwoValues):
    """No score is relative."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        weights = (q @ k.mT).softmax(-1)
        said = weights @ v, torch.einsum("bhij,bijd->bhid", weights, (x[:, :, None] * x[:, None])[..., :K])
        return self.W_o(torch.cat([y.transpose(1, 2).flatten(2) for y in said], dim=-1))


class Local(Layer):
    """Groups whose number has another name, as in gpt-fast."""

    name = "n_local_heads"

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.d_head = self.num_heads, K
        setattr(self, self.name, 2)
        del self.num_heads
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        G = getattr(self, self.name)
        sizes = [self.n_head * K, G * K, G * K]
        q, k, v = (y.unflatten(-1, (-1, K)).transpose(1, 2) for y in self.qkv(x).split(sizes, -1))
        k, v = (y.repeat_interleave(self.n_head // G, dim=1) for y in (k, v))
        return self.W_o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class QueryGroups(Local):
    name = "n_query_groups"


@pytest.mark.parametrize(
    "kind",
    [
        WithCore,
        Memories,
        OfInput,
        Relative,
        RelativeValues,
        TwoWeights,
        Difference,
        Pairs,
        OneQuery,
        Local,
        QueryGroups,
    ],
)
def test_heads_are_removed_exactly(kind: Any, tmp_path: Path) -> None:
    check(kind, tmp_path)


class PlacesFirst(RelativeValues):
    """Scores of distances, to which those of the keys are added."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        places = torch.arange(x.shape[1])
        scores = torch.einsum("bhid,ijd->bhij", q, self.far[places[:, None] - places + 12]) + q @ k.mT
        return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_keys_are_told_from_places_also_where_there_are_as_many_of_these_as_heads() -> None:
    model = made(PlacesFirst)
    batch = {"x": torch.randint(20, (3, HEADS)), "labels": torch.tensor([0, 1, 2])}
    heads = mhaprune.wrap(model, mhaprune.losses.classification, score=[batch], call=call)
    assert repr(heads).endswith("all removable")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Difference, "those of layers.0 are differences of two softmaxes"),
        (TwoWeights, "which layers.0 does not compute"),
    ],
)
def test_weights_that_are_not_those_of_heads_are_none_to_look_at(kind: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"needs attention weights, {why}"):
        wrapped(made(kind)).score(Confidence())


@pytest.mark.parametrize("kind", [TwoValues, Blocks, OwnValues])
def test_more_that_the_weights_of_a_head_make_is_never_left(kind: Any) -> None:
    with pytest.raises(ValueError, match="its weights make more of what W_O reads") as refused:
        wrapped(made(kind))
    assert "\n" not in str(refused.value)


class Decoder(Layer):
    """Two kinds of attention in one module: of the text, and of the text backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.M_q, self.M_k, self.M_v, self.M_o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.view(*y.shape[:2], self.num_heads, -1).transpose(1, 2) for y in (q, k, v))
        return ((q @ k.mT / K**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.W_o(self.attend(self.W_q(x), self.W_k(x), self.W_v(x)))
        memory = x.flip(1)
        return y - x + self.M_o(self.attend(self.M_q(y), self.M_k(memory), self.M_v(memory)))


class Wide(Decoder):
    """The second kind has fewer and wider heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = self.wide = not getattr(self, "wide", True)
        q, k, v = (y.unflatten(-1, (-1, 2 * K if wide else K)).transpose(1, 2) for y in (q, k, v))
        return ((q @ k.mT / K**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Reads(Layer):
    """The same weights weigh other values for a second W_O."""

    def __init__(self) -> None:
        super().__init__()
        self.V, self.O = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, w = (
            f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v, self.V)
        )
        weights = (q @ k.mT).softmax(-1)
        one, other = (weights @ y for y in (v, w))
        return self.W_o(one.transpose(1, 2).flatten(2)) + self.O(other.transpose(1, 2).flatten(2))


def test_what_stays_of_a_module_with_several_w_o_is_named() -> None:
    assert "8 removable (M_o.0 is not: layers.0.W_o reads heads of another width there" in repr(wrapped(made(Wide)))
    assert repr(wrapped(made(Reads))).endswith("; not seen: layers.0.O, layers.1.O")


class Unhooked(Net):
    """Layers whose code is run, not they themselves."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for layer in self.layers:
            y = y + layer.forward(y)
        return self.end(y.mean(1))


@pytest.mark.parametrize("net", [Net, Unhooked])
def test_each_of_several_w_o_of_one_module_has_its_heads(net: type[Net], tmp_path: Path) -> None:
    model = made(Decoder, net).double()
    heads, outs = wrapped(model), [f"layers.{n}.{out}" for n in range(2) for out in ("W_o", "M_o")]
    assert repr(heads).startswith("16 heads in 4 blocks, all with an effect, all removable")
    assert [str(block) for block in heads.grid.blocks] == ["W_o.0", "M_o.0", "W_o.1", "M_o.1"]
    small = heads.prune(mask={"W_o.0": [1, 3], "M_o.0": [2], "W_o.1": [0], "M_o.1": [0, 1, 2]})
    gone = dict(enumerate([[1, 3], [2], [0], [0, 1, 2]]))
    assert apart(small, closed(model, outs, gone)) < 1e-9
    mhaprune.save(small, tmp_path)
    assert apart(mhaprune.load(tmp_path, model=made(Decoder, net, seed=5).double()), small) == 0
    again = wrapped(small)
    assert [str(head) for head in again.grid if head.layer == 0] == [
        "W_o.0.0",
        "W_o.0.2",
        *(f"M_o.0.{h}" for h in (0, 1, 3)),
    ]
    smaller = again.prune(mask={"W_o.0": [0], "M_o.0": [3]})
    assert apart(smaller, closed(model, outs, gone | {0: [0, 1, 3], 1: [2, 3]})) < 1e-9
    rises = heads.score("ablation").set_index(["site", "layer", "head"])["score"]
    assert rises["M_o", 1, 2] == pytest.approx(effect(model, outs, 3, 2), abs=1e-6)
    with pytest.raises(ValueError, match="needs attention weights, which .* does not show for .*W_o alone"):
        heads.score(Confidence())
    with pytest.raises(ValueError, match="cannot stream"):
        heads.streaming(1, 2)
