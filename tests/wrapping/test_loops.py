"""Layers that compute their heads in several calls of attention, as in a loop over heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.own_layers import HEADS, WIDTH, Layer, Net, apart, by_head, check, closed, made, wrapped

K = WIDTH // HEADS


class Looped(Layer):
    """A loop over heads, or over several of them at once, and one W_O for what all say."""

    at_once, shared = 1, 1

    def __init__(self) -> None:
        super().__init__()
        self.W_k, self.W_v = (nn.Linear(WIDTH, WIDTH // self.shared) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = [f(x).split(K * self.at_once, -1) for f in (self.W_q, self.W_k, self.W_v)]
        of = len(parts[0]) // len(parts[1])
        said = [self.one(q, parts[1][n // of], parts[2][n // of]) for n, q in enumerate(parts[0])]
        return self.W_o(torch.cat(said, -1))

    def one(self, *qkv: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, K)).transpose(1, 2) for x in qkv)
        if self.at_once == 1:
            q, k, v = q[:, 0], k[:, 0], v[:, 0]
        said = (q @ k.mT / 2).softmax(-1) @ v
        return said if self.at_once == 1 else said.transpose(1, 2).flatten(2)


class LoopedPairs(Looped):
    at_once = 2


class LoopedGroups(Looped):
    shared = 2


class LoopedShared(Looped):
    shared = HEADS


class LoopedInPieces(Looped):
    """Loops over heads and over positions."""

    def one(self, *qkv: Tensor) -> Tensor:
        q, k, v = qkv
        return torch.cat([(piece @ k.mT / 2).softmax(-1) @ v for piece in q.split(3, 1)], 1)


class Twice(Net):
    """Each layer is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for layer in [*self.layers, *self.layers]:
            y = y + layer(y)
        return self.end(y.mean(1))


@pytest.mark.parametrize(
    ("kind", "net"),
    [*((kind, Net) for kind in (Looped, LoopedPairs, LoopedGroups, LoopedShared, LoopedInPieces)), (Looped, Twice)],
)
def test_heads_that_a_loop_computes_are_removed(kind: Any, net: type[Net], tmp_path: Path) -> None:
    model, heads, small = check(kind, tmp_path / "saved", net=net)
    left = wrapped(small)
    assert [block.names for block in left.subject.blocks] == [(0, 2), (1, 2, 3)]
    assert {block.calls for block in heads.subject.blocks} == {1 + (net is Twice)}
    assert len({*heads.subject.blocks[0].of_kv}) == HEADS // kind.shared
    outs = ["layers.0.W_o", "layers.1.W_o"]
    assert apart(left.prune(mask={1: [3]}), closed(model, outs, {0: [1, 3], 1: [0, 3]})) < 1e-9


class Numbered(Looped):
    """Each head has a gate, a bias of its scores and one of its queries, of the layer's own."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.u = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(HEADS, K))
        self.bias, self.gate = nn.Parameter(torch.zeros(HEADS, 9, 9)), nn.Linear(WIDTH, HEADS)

    def gates(self, x: Tensor) -> Tensor:
        return self.alpha * self.gate(x).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        T, gates, said = x.shape[1], self.gates(x), []
        for h, (q, k, v) in enumerate(zip(*(f(x).split(K, -1) for f in (self.W_q, self.W_k, self.W_v)), strict=True)):
            weights = ((q + self.u[h]) @ k.mT / 2 + self.bias[h, :T, :T]).softmax(-1)
            said.append(gates[..., h, None] * (weights @ v))
        return self.W_o(torch.cat(self.turned(said), -1))

    def turned(self, said: list[Tensor]) -> list[Tensor]:
        return said


class SharesOfOne(Numbered):
    """The gates of the exercise: a softmax over heads."""

    def gates(self, x: Tensor) -> Tensor:
        return self.alpha.softmax(0)


@pytest.mark.parametrize("kind", [Numbered, SharesOfOne])
def test_numbers_of_the_heads_of_a_loop_go_with_them(kind: Any, tmp_path: Path) -> None:
    *_, small = check(kind, tmp_path / "saved")
    layer: Any = small.layers[0]
    assert [len(each) for each in (layer.alpha, layer.u, layer.bias)] == [2] * 3
    assert kind is SharesOfOne or len(layer.gate.weight) == 2


@pytest.mark.parametrize("kind", ["SharesOfOne", "Indexed", "OnValues", "InPieces"])
def test_a_score_reads_the_gates_of_a_loop(kind: str) -> None:
    model: Any = made(globals()[kind])
    rows = wrapped(model).score("gate").sort_index()["score"].tolist()
    assert rows == pytest.approx([each for layer in model.layers for each in layer.alpha.softmax(0).tolist()], rel=1e-5)


class Backwards(Numbered):
    def turned(self, said: list[Tensor]) -> list[Tensor]:
        return said[::-1]


def test_heads_that_w_o_reads_in_another_order_are_gated() -> None:
    model = made(Backwards).double()
    heads = wrapped(model)
    assert "none removable: layers.0: its heads are computed by several calls of attention, in another" in repr(heads)
    with heads.closed({0: [1, 3], 1: [0]}) as gated:
        assert apart(gated, closed(model, ["layers.0.W_o", "layers.1.W_o"])) < 1e-9


class Indexed(SharesOfOne):
    """Each gate is taken from the softmax by itself."""

    def gates(self, x: Tensor) -> Tensor:
        shares = self.alpha.softmax(0)
        return torch.stack([shares[h] for h in range(len(shares))])


class OnValues(SharesOfOne):
    """The gates multiply the values, before the weights do."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [f(x).split(K, -1) for f in (self.W_q, self.W_k, self.W_v)]
        shares = zip(self.gates(x), *parts, strict=True)
        return self.W_o(torch.cat([(q @ k.mT / 2).softmax(-1) @ (v * gate) for gate, q, k, v in shares], -1))


def test_gates_on_values_are_made_up_for_beside_a_layer_without_heads() -> None:
    model, gone = made(OnValues).double(), {0: [1], 1: [0, 1, 2, 3]}
    small: Any = wrapped(model).prune(mask=gone)
    assert apart(small, closed(model, ["layers.0.W_o", "layers.1.W_o"], gone)) < 1e-9
    assert len(small.layers[0].alpha) == 3


class InPieces(SharesOfOne):
    """All heads at once, for some positions after the others."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = by_head(self, x)
        said = torch.cat([(piece @ k.mT / 2).softmax(-1) @ v for piece in q.split(3, 2)], 2)
        return self.W_o((said * self.gates(x)[:, None, None]).transpose(1, 2).flatten(2))


class FromTheEnd(Looped):
    """The last head attends more evenly: right as long as it stays."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [*zip(*(f(x).split(K, -1) for f in (self.W_q, self.W_k, self.W_v)), strict=True)]
        said = [(q @ k.mT / (2 + (h == len(parts) - 1))).softmax(-1) @ v for h, (q, k, v) in enumerate(parts)]
        return self.W_o(torch.cat(said, -1))


class Normed(Looped):
    """A norm over all heads mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.W_o = nn.Sequential(self.norm, self.W_o)  # type: ignore[assignment]


def test_what_a_removal_would_change_is_gated_or_refused() -> None:
    assert "none removable: its heads are computed by several calls" in repr(wrapped(made(FromTheEnd).double()))
    with pytest.raises(ValueError, match="its heads are mixed before the first linear module that reads them"):
        wrapped(made(Normed))
