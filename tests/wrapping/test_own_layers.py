"""Attention as others write it: by any product, in any order of dimensions, with sizes named in any way."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mhaprune_literature.attention import Confidence
from support.own_layers import (
    GONE,
    HEADS,
    WIDTH,
    Layer,
    Net,
    apart,
    batches,
    by_head,
    call,
    check,
    check_refit,
    closed,
    made,
    wrapped,
)

K = WIDTH // HEADS


class ByEinsum(Layer):
    """The dimensions of heads are in the usual place."""

    scores, said = "bihd,bjhd->bhij", "bhij,bjhd->bihd"
    dim = -1

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.num_heads, -1)) for each in (self.W_q, self.W_k, self.W_v))
        weights = (torch.einsum(self.scores, q, k) / q.shape[-1] ** 0.5).softmax(self.dim)
        return self.W_o(torch.einsum(self.said, weights, v).flatten(2))


class KeysFirst(ByEinsum):
    """Scores by key and query, and a softmax over the first of them, as in the code of XLNet."""

    scores, said, dim = "bihd,bjhd->jibh", "jibh,bjhd->bihd", 0


class HeadsFirst(ByEinsum):
    scores, said = "bihd,bjhd->hbij", "hbij,bjhd->bihd"


class Dotted(ByEinsum):
    """Dots, blanks, and the values before the weights."""

    scores = " ...ihd, ...jhd -> ...hij"

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.num_heads, -1)) for each in (self.W_q, self.W_k, self.W_v))
        weights = torch.einsum(self.scores, [q, k]).softmax(-1)
        return self.W_o(torch.einsum("bjhd,bhij->bihd", v, weights).flatten(2))


class Transposed(Layer):
    """Values times weights, transposed, as in non-local networks."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.fold(each(x)) for each in (self.W_q, self.W_k, self.W_v))
        weights = torch.bmm(q, k.mT).softmax(-1)
        said = torch.bmm(v.mT, weights.mT).mT.reshape(-1, self.num_heads, x.shape[1], q.shape[-1])
        return self.W_o(said.transpose(1, 2).flatten(2))


class OverQueries(Layer):
    """The softmax runs over the second last dimension: the scores are those of keys by queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.W_q, self.W_k, self.W_v)
        )
        weights = (k @ q.mT / 2).softmax(-2)
        return self.W_o((weights.mT @ v).transpose(1, 2).flatten(2))


class Windows(Layer):
    """Windows and heads share the first of three dimensions."""

    heads_last = True

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        pad = -T % 3
        x = F.pad(x, (0, 0, 0, pad)).unflatten(1, (-1, 3))  # (B, windows, 3, D)
        q, k, v = (each(x).unflatten(-1, (self.num_heads, -1)) for each in (self.W_q, self.W_k, self.W_v))
        order = (0, 1, 3, 2, 4) if self.heads_last else (3, 0, 1, 2, 4)
        q, k, v = (each.permute(order).flatten(0, 2) for each in (q, k, v))
        said = (q @ k.mT).softmax(-1) @ v
        shape = (B, -1, self.num_heads) if self.heads_last else (self.num_heads, B, x.shape[1])
        said = said.unflatten(0, shape).permute((0, 1, 3, 2, 4) if self.heads_last else (1, 2, 3, 0, 4))
        return self.W_o(said.flatten(3).flatten(1, 2)[:, :T])


class HeadsBeforeWindows(Windows):
    heads_last = False


class Annotated(nn.Module):
    """The width is named and -1 stands for the positions, as in the Annotated Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.d_k = HEADS, K
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        q, k, v = (f(x).view(n, -1, self.h, self.d_k).transpose(1, 2) for f in self.linears[:3])  # type: ignore[union-attr, misc]
        weights = torch.matmul(q, k.transpose(-2, -1)).softmax(dim=-1)
        said = torch.matmul(weights, v).transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        return self.linears[-1](said)


class Numbers(Annotated):
    """The same with plain numbers, and positions before -1."""

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (f(x).view(-1, t, 4, 4).transpose(1, 2) for f in self.linears[:3])  # type: ignore[union-attr, misc]
        said = torch.matmul((q @ k.mT).softmax(dim=-1), v).transpose(1, 2).reshape(n, -1, 16)
        return self.linears[-1](said)


class Unflattened(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.W_q, self.W_k, self.W_v))
        return self.W_o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class InScores(Layer):
    """Windows with a mask each: the number of heads is named in a view of the scores, and their width is that of the
    data by this number, as in the first Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("mask", torch.linspace(0, 1, 2 * 9).view(2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        x = F.pad(x, (0, 0, 0, -T % 6)).reshape(-1, 3, C)
        q, k, v = self.qkv(x).reshape(len(x), 3, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT).view(len(x) // 2, 2, self.num_heads, 3, 3) + self.mask[None, :, None]
        said = scores.view(-1, self.num_heads, 3, 3).softmax(-1) @ v
        return self.W_o(said.transpose(1, 2).reshape(B, -1, C)[:, :T])


class Split(nn.Module):
    """A layer of einops, as far as a removal meets it: it holds the lengths of its axes twice."""

    def __init__(self, **lengths: int) -> None:
        super().__init__()
        self.axes_lengths, self._axes_lengths = lengths, tuple(lengths.items())

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (dict(self._axes_lengths)["h"], -1)).transpose(1, 2)


class InALayer(Layer):
    """The number of heads is held by layers that split them."""

    def __init__(self) -> None:
        super().__init__()
        del self.num_heads
        self.split = nn.ModuleList(Split(h=HEADS) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made = zip(self.split, (self.W_q, self.W_k, self.W_v), strict=True)
        q, k, v = (split(linear(x)) for split, linear in made)
        return self.W_o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ByChannel(Layer):
    """1×1 convolutions over (B, C, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x.mT).unflatten(1, (self.num_heads, -1)).mT for f in (self.W_q, self.W_k, self.W_v))
        return self.W_o(F.scaled_dot_product_attention(q, k, v).mT.flatten(1, 2)).mT


class ByNumbers(ByChannel):
    """The same with plain numbers."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x.mT).unflatten(1, (4, 4)).mT for f in (self.W_q, self.W_k, self.W_v))
        return self.W_o(F.scaled_dot_product_attention(q, k, v).mT.reshape(len(x), 16, -1)).mT


class OfImages(Layer):
    """Maps (B, C, T, 1), a norm over the batch after the queries, and a wide convolution that makes keys and values."""

    def __init__(self) -> None:
        super().__init__()
        del self.W_k, self.W_v
        self.W_q, self.W_o = nn.Conv2d(WIDTH, WIDTH, 1, bias=False), nn.Conv2d(WIDTH, WIDTH, 1)
        self.norm, self.kv = nn.BatchNorm2d(WIDTH), nn.Conv2d(WIDTH, 2 * WIDTH, (2, 1), stride=(2, 1))
        self.norm.running_mean, self.norm.running_var = torch.randn(WIDTH), torch.rand(WIDTH) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = x.mT[..., None]
        made = (self.norm(self.W_q(y)), *self.kv(y).chunk(2, dim=1))
        q, k, v = (each.flatten(2).unflatten(1, (self.num_heads, -1)).mT for each in made)
        said = torch.matmul((q @ k.mT).softmax(-1), v)
        return self.W_o(said.mT.flatten(1, 2)[..., None])[..., 0].mT


class NormedByHead(Layer):
    """A norm of each head's output, by its groups."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(HEADS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.W_o(self.norm(said.mT).mT)


class Parameters(Layer):
    """Parameters of all heads, (H, D, K), without a module."""

    def __init__(self) -> None:
        super().__init__()
        del self.W_q, self.W_k, self.W_v, self.num_heads
        self.Q, self.K, self.V = (nn.Parameter(torch.randn(HEADS, WIDTH, K)) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(HEADS, K))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hdk->bhtk", x, each) for each in (self.Q, self.K, self.V))
        return self.W_o(F.scaled_dot_product_attention(q + self.bias[:, None], k, v).transpose(1, 2).flatten(2))


class Matrices(Layer):
    """Parameters (D, H·K), and a key and a value of every head's own before those of the positions."""

    def __init__(self) -> None:
        super().__init__()
        del self.W_q, self.W_k, self.W_v
        self.Q, self.K, self.V = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))
        self.first = nn.Parameter(torch.randn(2, HEADS, 1, K))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = ((x @ each).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.Q, self.K, self.V))
        k, v = (
            torch.cat([one.expand(len(x), -1, -1, -1), y], dim=2) for one, y in zip(self.first, (k, v), strict=True)
        )
        return self.W_o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class WeightOnly(Layer):
    """The weight of a linear module that is not called is joined by einsum."""

    def forward(self, x: Tensor) -> Tensor:
        q, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_v))
        k = torch.einsum("hkd,btd->bhtk", self.W_k.weight.view(self.num_heads, -1, WIDTH), x)
        return self.W_o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class InPieces(Layer):
    """W_O is called for a few positions at a time."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return torch.cat([self.W_o(piece) for piece in said.split(3, dim=1)], dim=1)


class Rectified(Layer):
    """The weights come from no softmax, and some queries see nothing."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        weights = F.relu(q @ k.mT) ** 2
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-6)
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


KINDS: list[Callable[[], nn.Module]] = [
    *(ByEinsum, KeysFirst, HeadsFirst, Dotted, Layer, Transposed, OverQueries, Windows, HeadsBeforeWindows),
    *(Unflattened, InScores, InALayer),
    *(ByChannel, ByNumbers, OfImages, NormedByHead, InPieces, Parameters, Matrices, WeightOnly, Rectified),
]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_found_removed_saved_and_read_again(kind: Any, tmp_path: Path) -> None:
    check(kind, tmp_path)


@pytest.mark.parametrize("kind", [Annotated, Numbers])
def test_a_width_may_be_named_and_positions_may_be_minus_one(kind: Any, tmp_path: Path) -> None:
    *_, small = check(kind, tmp_path, out="linears.3")
    layer: Any = small.layers[0]
    assert kind is Numbers or (layer.h == 2 and "forward" not in vars(layer)), "to translate sizes takes time"


@pytest.mark.parametrize(("kind", "shown"), [(ByEinsum, True), (KeysFirst, True), (HeadsFirst, False), (Layer, False)])
def test_attention_weights_are_shown_or_refused(kind: Any, shown: bool) -> None:
    heads = wrapped(made(kind))
    if not shown:
        with pytest.raises(ValueError, match="needs attention weights"):
            heads.score(Confidence())
        return
    [seen, _] = heads.subject.attention_maps(heads.splits["score"].batches(6).__iter__().__next__()).values()
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(seen.weights.shape[:-1]))


class WithoutWeight(Net):
    """It has no attention, but two products with a softmax over classes between them: a memory."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(nn.Identity)
        self.slots = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        y = y + (y @ self.slots.mT).softmax(-1) @ self.slots
        return self.end(y.mean(1))


class Routed(Net):
    """A mixture of experts: the softmax is over the experts."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(nn.Identity)
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        shares = self.router(y).softmax(-1)
        y = torch.einsum("bte,beto->bto", shares, torch.einsum("bti,eio->beto", y, self.experts))
        return self.end(y.mean(1))


class Silent(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1, keepdim=True).expand(-1, 3).double()


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (WithoutWeight, "^WithoutWeight: no attention found"),
        (Routed, "^Routed: no attention found"),
        (Silent, "closing .* changes outputs without a derivative|no derivative|changes no output"),
    ],
)
def test_what_is_no_attention_is_refused_in_one_line(net: type[Net], why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        wrapped(made(Layer, net)).score("taylor")
    assert "\n" not in str(refused.value)


class ByView(Layer):
    """Values times weights, transposed, then a view that needs the numbers in order."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        weights = (q @ k.mT).softmax(-1)
        return self.W_o((v.mT @ weights.mT).view(B, -1, T).mT)


class Padded(ByChannel):
    """Paddings named by words."""

    def __init__(self) -> None:
        super().__init__()
        self.W_k, self.W_o = nn.Conv1d(WIDTH, WIDTH, 3, padding="same"), nn.Conv1d(WIDTH, WIDTH, 1, padding="same")


@pytest.mark.parametrize("kind", [ByView, Padded])
def test_what_a_layer_names_in_its_own_way_is_cut(kind: Any, tmp_path: Path) -> None:
    check(kind, tmp_path)


class WithMaps(Layer):
    """It returns its attention weights too."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = by_head(self, x)
        weights = (q @ k.mT).softmax(-1)
        return self.W_o((weights @ v).transpose(1, 2).flatten(2)), weights


class Shown(Net):
    """It returns the logits and the attention weights of all layers, side by side or as one tensor."""

    stacked = False

    def forward(self, x: Tensor) -> Any:
        y, maps = self.embed(x), []
        for layer in self.layers:
            more, weights = layer(y)
            y, maps = y + more, [*maps, weights]
        return {"logits": self.end(y.mean(1)), "maps": torch.stack(maps) if self.stacked else maps}


def test_attention_weights_beside_the_answer_have_fewer_heads_in_a_smaller_model() -> None:
    model = made(WithMaps, Shown).double()
    heads = wrapped(model, choose=batches(3))
    small = heads.prune(mask=GONE, distil=batches(4), minutes=0.01)
    assert [len(x[0]) for x in call(small, batches()[0])["maps"]] == [2, 3]
    said = call(heads.prune(mask=GONE), batches()[0])["logits"]
    shut = closed(model, ["layers.0.W_o", "layers.1.W_o"])
    torch.testing.assert_close(said, call(shut, batches()[0])["logits"], atol=1e-9, rtol=0)


class OfHeads(Layer):
    """Its number of heads has a name that other things have too, and a view fits any number."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = self.num_heads
        del self.num_heads

    def forward(self, x: Tensor) -> Any:
        B, T, _ = x.shape
        q, k, v = (f(x).reshape(B, T, self.heads, -1).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        weights = (q @ k.mT).softmax(-1)
        return self.W_o((weights @ v).transpose(1, 2).reshape(B, T, -1)), weights


class Stacked(Shown):
    stacked = True


def test_the_reason_names_the_first_reading_of_sizes_and_the_nearest_other_one() -> None:
    model = made(OfHeads, Stacked).double()
    assert re.search(
        r"none removable: masked and removed differ by .*; with its sizes read in other ways: .*equal size",
        repr(wrapped(model)),
    )


class ByPosition(Layer):
    """Weights that no query makes: a layer before it has a product of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(HEADS, 12, 12))

    def forward(self, x: Tensor) -> Tensor:
        v = self.W_v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        weights = self.places[:, : x.shape[1], : x.shape[1]].softmax(-1)
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


def test_weights_of_another_product_are_not_those_of_an_earlier_layer() -> None:
    kinds = iter([ByEinsum, ByPosition])
    model = made(lambda: next(kinds)()).double()
    heads = wrapped(model)
    assert repr(heads) == "4 heads in 1 block, all with an effect, all removable; not seen: layers.1"
    assert apart(heads.prune(mask={0: [1]}), closed(model, ["layers.0.W_o"], {0: [1]})) < 1e-9


def test_a_refit_of_a_convolution_is_better_than_none() -> None:
    check_refit(wrapped(made(OfImages)))
