"""Tensors that a layer makes of numbers for all heads: in a call, in `eval`, or as a cache."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhaprune
from support.own_layers import (
    GONE,
    HEADS,
    WIDTH,
    Layer,
    apart,
    by_head,
    closed,
    effect,
    made,
    wrapped,
)

K = WIDTH // HEADS


class Kept(Layer):
    """Keys and values are written into tensors that are plain attributes, and a table into a buffer that is not saved.
    What T5 calls its bias is none here."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = (torch.zeros(6, 12, HEADS, K) for _ in range(2))
        self.relative_attention_bias = None
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        if self.table is None or len(self.table) < T:
            self.register_buffer("table", torch.arange(T).to(x)[:, None], persistent=False)
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)) for f in (self.W_q, self.W_k, self.W_v))
        self.keys, self.values = self.keys.to(x), self.values.to(x)
        self.keys[:B, :T], self.values[:B, :T] = k, v + self.table[:T, None]
        q, k, v = (y.transpose(1, 2) for y in (q, self.keys[:B, :T], self.values[:B, :T]))
        return self.W_o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def slopes_of(heads: int, length: int) -> Tensor:
    places = torch.arange(length)
    return 0.5 ** torch.arange(heads)[:, None, None] * (places - places[:, None])


class SlopesOfLayer(Layer):
    """Slopes (Press et al. 2022) that are a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes: Any = slopes_of(HEADS, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        scores = q @ k.mT + self.slopes[:, : x.shape[1], : x.shape[1]]
        return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Slopes(SlopesOfLayer):
    """They are made when a text is longer than those before it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.slopes.shape[-1] < x.shape[1]:
            self.slopes = slopes_of(self.num_heads, x.shape[1])
        return super().forward(x)


class SlopesIfAny(SlopesOfLayer):
    """Without slopes the layer does without."""

    def forward(self, x: Tensor) -> Tensor:
        said: Tensor = Layer.forward(self, x) if self.slopes is None else super().forward(x)
        return said


class SlopesOfCall(SlopesOfLayer):
    """They are made of the number of heads in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.slopes = slopes_of(self.num_heads, x.shape[1])
        return super().forward(x)


class SlopesByLength(SlopesOfLayer):
    """They are made for each length, and kept in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.by_length = dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.slopes = self.by_length.setdefault(x.shape[1], slopes_of(HEADS, x.shape[1]))
        return super().forward(x)


class SlopesAsMask(Layer):
    """The fused function is given them as a mask."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        slopes = slopes_of(self.num_heads, x.shape[1]).to(x)
        said = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=slopes)
        return self.W_o(said.transpose(1, 2).flatten(2))


class WindowOfHead(Layer):
    """Each head sees another number of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        far = slopes_of(1, x.shape[1]).abs() > 1 + torch.arange(self.num_heads)[:, None, None]
        scores = torch.where(far, torch.full((1, 1, 1), -torch.inf), q @ k.mT)
        return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ListOfGates(Layer):
    """A gate for each head is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(HEADS)])

    def through(self, x: Tensor) -> Tensor:
        return x * torch.stack([*self.gates]).view(1, -1, 1, 1)


OUTS = ["layers.0.W_o", "layers.1.W_o"]


@pytest.mark.parametrize(
    "kind",
    [SlopesOfLayer, SlopesIfAny, Slopes, SlopesOfCall, SlopesByLength, SlopesAsMask, WindowOfHead, ListOfGates],
)
def test_tensors_that_a_layer_has_are_cut_and_heads_read_their_parts_of_those_that_a_call_makes(
    kind: Any, tmp_path: Path
) -> None:
    model = made(kind).double()
    small = wrapped(model).prune(mask=GONE)
    assert apart(small, closed(model, OUTS)) < 1e-9
    mhaprune.save(small, tmp_path)
    assert apart(mhaprune.load(tmp_path, model=made(kind, seed=5).double()), small) == 0
    again = wrapped(small).prune(mask={1: [2]})
    assert apart(again, closed(model, OUTS, {**GONE, 1: [*GONE[1], 2]})) < 1e-9


@pytest.mark.parametrize("kind", [SlopesOfCall, SlopesAsMask])
def test_positions_and_widths_may_be_as_many_as_heads(kind: Any) -> None:
    """Four heads of width four, of which three are left, for three positions of three examples."""
    model, mask = made(kind).double(), {0: [1], 1: [0]}
    small, x = wrapped(model).prune(mask=mask), torch.arange(9).view(3, 3)
    torch.testing.assert_close(small(x), closed(model, OUTS, mask)(x))
    assert repr(wrapped(small)).endswith("all removable")


class Outer(SlopesOfCall):
    """A layer that calls another one of as many heads, in which others are left."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SlopesOfCall()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.inner(x))


def test_a_layer_in_another_reads_its_own_parts() -> None:
    model = made(Outer).double()
    heads = wrapped(model)
    outs = [block.out for block in heads.subject.blocks]
    gone = {n: [1 + out.endswith("inner.W_o")] for n, out in enumerate(outs)}
    names = [str(head) for n, name in enumerate(heads.grid.blocks) for head in heads.grid if head.block == name]
    mask = [name for n, name in enumerate(names) if n % HEADS in gone[n // HEADS]]
    assert apart(heads.prune(mask=mask), closed(model, outs, gone)) < 1e-9


def test_two_heads_stay_where_a_call_makes_tensors_for_all() -> None:
    """A single one would be repeated for all."""
    heads = wrapped(made(SlopesOfCall))
    with pytest.raises(ValueError, match=r"^layers\.1: must keep two heads, as where calls make tensors for all"):
        heads.prune(mask={1: [0, 1, 2]})
    kept = heads.mask(keep=4, by=[1.0, 2, 3, 4, 5, 6, 7, 8]).kept
    assert [head.layer for head in kept] == [0, 0, 1, 1]
    assert [*heads.must_stay().values()] == [2, 2]
    with pytest.raises(ValueError, match="4 must stay"):
        heads.mask(keep=3, by="random")


class Cached(Layer):
    """In evaluation it uses biases of positions that `eval` has made of a parameter, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Parameter(torch.zeros(HEADS, 12))

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode:
            del self.made
        else:
            with torch.no_grad():
                self.W_q.weight += 1  # as where an adapter is merged
            places = torch.arange(12)
            self.made = self.biases[:, (places[:, None] - places).abs()]
        return self

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        T = x.shape[1]
        weights = (q @ k.mT + self.made[:, :T, :T]).softmax(-1)
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


def test_what_eval_makes_of_a_parameter_is_made_for_all_heads_again() -> None:
    model = made(Cached).double().eval()
    before = copy.deepcopy(model.state_dict())
    heads = wrapped(model)
    small = heads.prune(mask=GONE)
    with heads.closed(GONE) as shut:
        assert apart(small, shut) < 1e-9
    assert small.layers[0].biases.shape == (HEADS, 12)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(
        ValueError, match="no attribute 'made'.*call model.eval.. first, Cached has a train.. of its own"
    ):
        wrapped(model.train())


def test_what_a_call_keeps_in_a_layer_is_cut_and_left_as_it_was() -> None:
    model = made(Kept).double()
    apart(model, model)  # a call, after which what it keeps is of float64 too
    for _ in range(2):
        for layer in model.layers:
            layer.table = None
        heads = wrapped(model)
        assert repr(heads).endswith("all removable")
        heads.score("taylor")
        small = heads.prune(mask=GONE)
        assert apart(small, closed(model, OUTS)) < 1e-9
        assert apart(copy.deepcopy(small), small) == 0


class Filled(Layer):
    """A table of positions that the first call, or a longer text, fills in place; a number says how far."""

    saved = False

    def __init__(self) -> None:
        super().__init__()
        self.filled = 0
        self.register_buffer("table", torch.zeros(12, 12), persistent=self.saved)

    def fill(self, T: int) -> None:
        places = torch.arange(12.0)
        self.table[:T] = -(places[:T, None] - places).abs()
        self.filled = T

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        if self.filled < T:
            self.fill(T)
        q, k, v = by_head(self, x)
        weights = (q @ k.mT + self.table[:T, :T]).softmax(-1)
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


class FilledOnce(Filled):
    """It is saved with the weights, and whole from the first call on."""

    saved = True

    def fill(self, T: int) -> None:
        super().fill(12)


class FilledByLength(Filled):
    """A table for each length, in a dictionary, made of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.by_length = nn.Parameter(torch.ones(1)), dict[int, Tensor]()

    def fill(self, T: int) -> None:
        super().fill(T)
        if T not in self.by_length:
            self.by_length[T] = (self.table[:T, :T] * self.scale).detach()

    def forward(self, x: Tensor) -> Tensor:
        self.fill(T := x.shape[1])
        q, k, v = by_head(self, x)
        return self.W_o(((q @ k.mT + self.by_length[T]).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [Filled, FilledOnce, FilledByLength])
@pytest.mark.parametrize("prove", ["blocks", "none"])
def test_tables_that_calls_fill_are_those_of_the_model(kind: Any, prove: str) -> None:
    """While heads are looked for, a pass writes to copies; what says that they are full must not stay."""
    model, same = made(kind).double(), made(kind).double()
    heads = wrapped(model, prove=prove)
    assert apart(model, same) == 0
    rises = heads.score("ablation").sort_index()["score"]
    assert rises.tolist() == pytest.approx([effect(same, OUTS, n, h) for n in range(2) for h in range(HEADS)], abs=1e-6)
    assert apart(heads.prune(mask=GONE), closed(same, OUTS)) < 1e-9
