"""Attention as others write it: by any product, in any order of dimensions, with sizes named in any way."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhaprune
from mhaprune.surgery.handed_weights import with_called_maps
from mhaprune_literature.attention import Confidence
from support.own_layers import GONE, HEADS, WIDTH, Layer, Net, apart, batches, call, check, closed, made, wrapped

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


class ByFunction(Layer):
    """`F.multi_head_attention_forward` with the weights of modules that nobody calls."""

    need_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def options(self, T: int) -> dict[str, Any]:
        return {}

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        bias = torch.cat([self.W_q.bias, self.W_k.bias, self.W_v.bias])
        said, _ = F.multi_head_attention_forward(
            *(y, y, y, WIDTH, self.num_heads, torch.empty(0), bias, None, None, False, 0.0),
            *(self.W_o.weight, self.W_o.bias, self.training),
            need_weights=self.need_weights,
            use_separate_proj_weight=True,
            q_proj_weight=self.W_q.weight,
            k_proj_weight=self.W_k.weight,
            v_proj_weight=self.W_v.weight,
            **self.options(x.shape[1]),
        )
        return said.transpose(0, 1)


class Causal(ByFunction):
    need_weights = True

    def options(self, T: int) -> dict[str, Any]:
        return {"attn_mask": torch.ones(T, T, dtype=torch.bool).triu(1)}


class Concatenated(ByFunction):
    """The weights of three modules, side by side."""

    def forward(self, x: Tensor) -> Tensor:
        y, joint = x.transpose(0, 1), torch.cat([self.W_q.weight, self.W_k.weight, self.W_v.weight])
        more: Any = (joint, None, None, None, False, 0.0, self.W_o.weight, self.W_o.bias, False)
        return F.multi_head_attention_forward(y, y, y, WIDTH, HEADS, *more)[0].transpose(0, 1)


class Packed(Layer):
    """One module makes queries, keys and values, and the function is handed its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.W_o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        more: Any = (self.qkv.weight, self.qkv.bias, None, None, False, 0.0, self.W_o.weight, self.W_o.bias)
        return F.multi_head_attention_forward(y, y, y, WIDTH, self.num_heads, *more, self.training)[0].transpose(0, 1)


class Handed(Layer):
    """W_O's weight, and that of the queries, are handed to F.linear."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.fold(F.linear(x, self.W_q.weight))
        k, v = self.fold(self.W_k(x)), self.fold(self.W_v(x))
        said = ((q @ k.mT).softmax(-1) @ v).unflatten(0, (-1, self.num_heads))
        return F.linear(said.transpose(1, 2).flatten(2), self.W_o.weight)


class InWindowsGrouped(nn.Module):
    """Windows stand before heads, and the fused function repeats the keys of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv = HEADS, 2
        self.W_q, self.W_o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.W_k, self.W_v = nn.Linear(WIDTH, 2 * K), nn.Linear(WIDTH, 2 * K)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        y = F.pad(x, (0, 0, 0, -T % 3)).reshape(-1, 3, WIDTH)
        q, k, v = (f(y).unflatten(-1, (-1, K)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.W_o(said.reshape(B, -1, said.shape[-1])[:, :T])


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


KINDS: list[Callable[[], nn.Module]] = [
    *(ByEinsum, KeysFirst, HeadsFirst, Dotted, Layer, Transposed, OverQueries, Windows, HeadsBeforeWindows),
    *(Unflattened, ByFunction, Causal, Concatenated, Packed, Handed, InScores, InALayer),
    *(ByChannel, ByNumbers, OfImages, NormedByHead, InPieces, Parameters, Matrices, WeightOnly),
]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_found_removed_saved_and_read_again(kind: Any, tmp_path: Path) -> None:
    check(kind, tmp_path)


@pytest.mark.parametrize("kind", [Annotated, Numbers])
def test_a_width_may_be_named_and_positions_may_be_minus_one(kind: Any, tmp_path: Path) -> None:
    check(kind, tmp_path, out="linears.3")


@pytest.mark.parametrize(("kind", "shown"), [(ByEinsum, True), (KeysFirst, True), (HeadsFirst, False), (Layer, False)])
def test_attention_weights_are_shown_or_refused(kind: Any, shown: bool) -> None:
    heads = wrapped(made(kind))
    if not shown:
        with pytest.raises(ValueError, match="needs attention weights"):
            heads.score(Confidence())
        return
    [seen, _] = heads.subject.attention_maps(heads.splits["score"].batches(6).__iter__().__next__()).values()
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(seen.weights.shape[:-1]))


class Grouped(nn.Module):
    """Grouped queries in one's own code: keys are repeated before the product."""

    def __init__(self, parts: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep = HEADS, parts, HEADS // parts
        self.wq, self.W_o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, parts * K, bias=False) for _ in range(2))

    def repeat(self, x: Tensor) -> Tensor:
        """(B, T, G, K) for every head, (B, T, H, K)."""
        return x[:, :, :, None].expand(-1, -1, -1, self.n_rep, -1).flatten(2, 3)

    def kv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.wk(x), self.wv(x)

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).view(*x.shape[:2], self.n_heads, K)
        k, v = (self.repeat(y.view(*x.shape[:2], self.n_kv_heads, K)) for y in self.kv(x))
        said = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        return self.W_o(said.transpose(1, 2).flatten(2))


class Interleaved(Grouped):
    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.n_rep, dim=2)


class InTurns(Grouped):
    """Head after head reads the next part."""

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat(1, 1, self.n_rep, 1)


class FusedParts(Grouped):
    """One module makes keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.wkv = nn.Linear(WIDTH, 4 * K, bias=False)
        del self.wk, self.wv

    def kv(self, x: Tensor) -> Any:
        return self.wkv(x).chunk(2, dim=-1)


class OnePart(Grouped):
    def __init__(self) -> None:
        super().__init__(1)


WHOLE, SINGLE, ONE_EACH = {0: [2, 3], 1: [0, 1]}, {0: [3], 1: [0, 2, 3]}, {0: [0, 2], 1: [1, 3]}


@pytest.mark.parametrize("kind", [Grouped, Interleaved, InTurns, FusedParts, OnePart, InWindowsGrouped])
@pytest.mark.parametrize("gone", [WHOLE, SINGLE, ONE_EACH], ids=["whole", "single", "one of each"])
def test_keys_that_a_layer_repeats_go_with_their_heads(kind: Any, gone: dict[int, list[int]], tmp_path: Path) -> None:
    model, _, small = check(kind, tmp_path, gone=gone)
    again = wrapped(small)
    left = next(head.head for head in again.grid if head.layer == 0)
    outs = ["layers.0.W_o", "layers.1.W_o"]
    assert apart(again.prune(mask={0: [left]}), closed(model, outs, {0: [*gone[0], left], 1: gone[1]})) < 1e-9


def test_groups_of_heads_are_units_too() -> None:
    model = made(Grouped).double()
    groups = wrapped(model).units("group")
    assert len(groups.grid) == 4
    small: Any = groups.prune(mask={0: [0]})
    assert small.layers[0].wk.out_features == K
    assert apart(small, closed(model, ["layers.0.W_o"], {0: [0, 1]})) < 1e-9


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


class Masked(ByFunction):
    """A causal mask and padding, as numbers and as truths; weights are asked for in every second layer."""

    def options(self, T: int) -> dict[str, Any]:
        padding = torch.zeros(self.examples, T).index_fill(1, torch.tensor([T - 1]), -1.5)
        return {"attn_mask": torch.ones(T, T).triu(1) * -2.0, "key_padding_mask": padding}

    def forward(self, x: Tensor) -> Tensor:
        self.examples = len(x)
        return super().forward(x)


def test_functional_attention_step_by_step_is_that_of_torch() -> None:
    model = made(Masked)
    model.layers[1].need_weights = True  # type: ignore[assignment]
    ours = with_called_maps(model, lambda model: call(model, batches()[0]))
    assert ours is not model
    assert apart(ours, model) < 1e-6


class Joint(nn.Module):
    """Two streams attend together, and each has an output projection of its own, as in Stable Diffusion 3."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.add_qkv = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.W_o, self.to_add_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def through(self, said: Tensor) -> Tensor:
        """Change the outputs of the heads, (B, H, T, K)."""
        return said

    def forward(self, x: Tensor) -> Tensor:
        few, many = x[:, :2], x[:, 2:]
        both = torch.cat([self.add_qkv(few), self.qkv(many)], dim=1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in both.chunk(3, -1))
        said = self.through(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2).flatten(2)
        return torch.cat([self.to_add_out(said[:, :2]), self.W_o(said[:, 2:])], dim=1)


class JointGated(Joint):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.linspace(-1, 2, HEADS))

    def through(self, said: Tensor) -> Tensor:
        return said * self.gates.softmax(0)[:, None, None]


def of_both(model: nn.Module, gone: dict[int, list[int]]) -> nn.Module:
    first = closed(model, [f"layers.{n}.W_o" for n in range(2)], gone)
    return closed(first, [f"layers.{n}.to_add_out" for n in range(2)], gone)


@pytest.mark.parametrize("kind", [Joint, JointGated])
def test_heads_that_two_maps_read_at_different_positions_are_closed_and_cut_in_both(kind: Any, tmp_path: Path) -> None:
    model = made(kind).double()
    heads = wrapped(model)
    assert repr(heads) == "8 heads in 2 blocks, all with an effect, all removable"
    with heads.closed(GONE) as gated:
        assert apart(gated, of_both(model, GONE)) < 1e-9
    for gone in (GONE, {0: [0, 1, 2, 3], 1: [2]}):
        small: Any = heads.prune(mask=gone)
        assert apart(small, of_both(model, gone)) < 1e-9
        mhaprune.save(small, tmp_path)
        assert apart(mhaprune.load(tmp_path, model=made(kind, seed=5).double()), small) == 0
    assert small.layers[1].to_add_out.in_features == small.layers[1].W_o.in_features == WIDTH - K
    shut, effects = batches(), heads.score("ablation").sort_index()["score"].tolist()
    for n, score in enumerate(effects):
        one = of_both(model, {n // HEADS: [n % HEADS]})
        with torch.no_grad():
            losses = [
                torch.cat([F.cross_entropy(call(of, each), each["labels"], reduction="none") for each in shut]).mean()
                for of in (one, model)
            ]
        assert abs(float(losses[0] - losses[1]) - score) < 1e-6


def test_scores_by_the_weights_of_one_w_o_are_refused_for_joint_attention() -> None:
    heads = wrapped(made(Joint))
    with pytest.raises(ValueError, match=r"needs one W_O for all positions, layers.0 has .*to_add_out, .*W_o; leave"):
        heads.score("magnitude")
    held = heads.subject.held_weights().tolist()
    assert held[0] == 2 * WIDTH * K + 2 * 3 * K * (WIDTH + 1)


def test_a_refit_of_joint_attention_is_better_than_none() -> None:
    check_refit(Joint)


class OntoScores(Layer):
    """The scores of a layer are added to those of the next, as in PatchTST."""

    fused = False

    def forward(self, x: Tensor, before: Tensor | None = None) -> Any:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.mT
        if self.fused:
            said = F.scaled_dot_product_attention(q, k, v, attn_mask=before)
        else:
            said = (scores if before is None else scores + before).softmax(-1) @ v
        return self.W_o(said.transpose(1, 2).flatten(2)), scores


class OntoMask(OntoScores):
    fused = True


class Onward(Net):
    def forward(self, x: Tensor) -> Tensor:
        y, scores = self.embed(x), None
        for layer in self.layers:
            out, scores = layer(y, scores)
            y = y + out
        return self.end(y.mean(1))


@pytest.mark.parametrize("kind", [OntoScores, OntoMask])
def test_layers_that_hand_scores_on_are_gated_and_say_that_their_heads_could_only_go_together(kind: Any) -> None:
    model = made(kind, Onward).double()
    heads = wrapped(model)
    assert re.search(
        r"none removable: layers.0: layers.0.W_[qk] makes scores of layers.0 and of layers.1, whose heads", repr(heads)
    )
    with heads.closed(GONE) as gated:
        assert apart(gated, closed(model, ["layers.0.W_o", "layers.1.W_o"])) < 1e-9


class Turned(Layer):
    """The width of a head stands before the heads, so that W_O reads the heads in turns."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.num_heads)).permute(0, 3, 1, 2) for f in (self.W_q, self.W_k, self.W_v))
        return self.W_o(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).flatten(2))


def test_columns_of_heads_may_stand_in_turns() -> None:
    model: Any = made(Turned).double()
    shut: Any = copy.deepcopy(model)
    with torch.no_grad():
        for n, heads in {0: [1, 3], 1: [0, 1, 2, 3]}.items():
            for h in heads:
                shut.layers[n].W_o.weight[:, h::HEADS] = 0
    assert apart(wrapped(model).prune(mask={0: [1, 3], 1: [0, 1, 2, 3]}), shut) < 1e-9


class NearAndFar(Layer):
    """Two calls of attention, and one W_O for both."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        far = F.scaled_dot_product_attention(q[:, :2], k[:, :2], v[:, :2])
        near = F.scaled_dot_product_attention(q[:, 2:], k[:, 2:], v[:, 2:], is_causal=True)
        return self.W_o(torch.cat([far, near], 1).transpose(1, 2).flatten(2))


def test_heads_of_two_calls_that_one_map_reads_are_all_gated() -> None:
    model = made(NearAndFar).double()
    heads, outs = wrapped(model), ["layers.0.W_o", "layers.1.W_o"]
    assert "8 heads in 2 blocks" in repr(heads)
    assert "none removable: layers.0: its heads are computed by several calls of attention" in repr(heads)
    with heads.closed(GONE) as gated:
        assert apart(gated, closed(model, outs)) < 1e-9
    with pytest.raises(ValueError, match="needs attention weights"):
        heads.score(Confidence())


def test_a_refit_of_a_convolution_is_better_than_none() -> None:
    check_refit(OfImages)


def check_refit(kind: Any) -> None:
    model = made(kind)
    heads = wrapped(model)
    plain, fitted = (heads.prune(mask=GONE, refit=refit) for refit in (False, True))

    def error(small: nn.Module) -> float:
        with torch.no_grad():
            return sum(float((call(small, batch) - call(model, batch)).square().sum()) for batch in batches())

    assert error(fitted) < error(plain)
