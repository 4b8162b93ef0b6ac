"""Each head a module of its own, as in many lectures: a list of heads, whose outputs are joined or added."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhaprune
from mhaprune.surgery.removal import held_weights
from support.own_layers import HEADS, WIDTH, Layer, Net, apart, batches, closed, loss, made, wrapped

K = WIDTH // HEADS
GONE: dict[int, list[int]] = {0: [0], 2: [0], 7: [0]}
"""Heads 0 and 2 of the first layer and the last one of the second: each is a block of its own."""
EVERY = {n: [0] for n in range(2 * HEADS)}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, K, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        k, q = self.key(x), self.query(x)
        scores = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5  # which knows no width of 0
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1) > 0, float("-inf"))
        return F.softmax(scores, dim=-1) @ self.value(x)


class Fused(Head):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)


class Joined(nn.Module):
    kind: type[Head] = Head

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(self.kind() for _ in range(HEADS))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))

    def close(self, head: int) -> None:
        self.proj.weight.data[:, head * K : (head + 1) * K] = 0


class JoinedFused(Joined):
    kind = Fused


class JoinedGated(Joined):
    """One learned number per head, by softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        weighed = zip(self.gate.softmax(0), self.heads, strict=True)
        return self.proj(torch.cat([g * head(x) for g, head in weighed], dim=-1))


class Added(Joined):
    """A W_O for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.proj: Any = nn.ModuleList(nn.Linear(K, WIDTH, bias=False) for _ in range(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([out(head(x)) for head, out in zip(self.heads, self.proj, strict=True)]).sum(0)

    def close(self, head: int) -> None:
        self.proj[head].weight.data.zero_()


def shut(model: Net, gone: Iterable[int]) -> Net:
    """Return a copy in which these heads are closed by hand."""
    other: Any = copy.deepcopy(model)
    for n in gone:
        other.layers[n // HEADS].close(n % HEADS)
    return other


@pytest.mark.parametrize("layer", [Joined, JoinedFused, JoinedGated, Added])
def test_a_head_of_its_own_is_removed_with_its_weights(layer: type[Joined], tmp_path: Path) -> None:
    """Values become vectors of width 0; one row of the queries and keys stays."""
    model = made(layer).double()
    heads = wrapped(model)
    assert repr(heads).startswith("8 heads in 8 blocks")
    assert repr(heads).endswith("all removable")
    small: Any = heads.prune(mask=GONE)
    assert apart(small, model) > 1e-3
    assert apart(small, shut(model, GONE)) < 1e-12
    of_head = 3 * WIDTH * K + K * WIDTH - 2 * WIDTH
    count = sum(each.numel() for each in model.parameters()) - len(GONE) * of_head
    assert sum(each.numel() for each in small.parameters()) == count
    assert [len(head.value.weight) for head in small.layers[0].heads] == [0, K, 0, K]
    assert held_weights(model, heads.subject.blocks[0]).tolist() == [of_head]
    mhaprune.save(small, tmp_path / "small")
    assert apart(small, mhaprune.load(tmp_path / "small", model=made(layer, seed=5).double())) == 0
    rises = heads.score("ablation").sort_index()["score"].tolist()
    for n, rise in enumerate(rises):
        assert rise == pytest.approx(loss(shut(model, [n])) - loss(model), abs=1e-6)
        assert apart(heads.prune(mask={n: [0]}), shut(model, [n])) < 1e-12
    assert apart(heads.prune(mask=EVERY), shut(model, EVERY)) < 1e-12


@pytest.mark.parametrize("layer", [Joined, Added])
def test_what_is_left_is_found_pruned_and_trained_again(layer: type[Joined]) -> None:
    model = made(layer).double()
    small = wrapped(model).prune(mask=GONE)
    again = wrapped(small)
    assert repr(again) == "5 heads in 5 blocks, all with an effect, all removable"
    more = {0: [0], 2: [0]}  # head 1 of the first layer, and the first of the second
    assert apart(again.prune(mask=more), shut(model, [*GONE, 1, 4])) < 1e-12
    heads = wrapped(made(layer), choose=batches())
    for how in ({"refit": True}, {"fine_tune": 2}):
        assert apart(heads.prune(mask=GONE, **how), heads.prune(mask=GONE)) > 0  # type: ignore[arg-type]


class Viewed(Head):
    """Code of one head that splits and joins it in views, which know no width of 0."""

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = (each(x).view(x.shape[0], -1, 1, K).transpose(1, 2) for each in (self.key, self.query, self.value))
        said = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return said.reshape(x.shape[0], -1, K)


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.proj = Viewed(), nn.Linear(K, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.head(x))


def test_a_head_whose_code_needs_its_width_keeps_a_silent_one() -> None:
    model = made(Alone).double()
    small: Any = wrapped(model).prune(mask={0: [0]})
    other: Any = copy.deepcopy(model)
    other.layers[0].proj.weight.data.zero_()
    assert apart(small, other) < 1e-12
    assert small.layers[0].proj.weight.shape == (WIDTH, K)


class Pair(nn.Module):
    """Two heads of usual code."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.maps = nn.ModuleList(nn.Linear(WIDTH, 2 * K) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.maps)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Pairs(Joined):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Pair() for _ in range(2))


@pytest.mark.parametrize("gone", [{0: [0]}, {1: [1]}, {0: [1], 1: [0], 3: [0]}])
def test_blocks_that_one_w_o_reads_lose_heads_each_for_itself(gone: dict[int, list[int]]) -> None:
    model = made(Pairs).double()
    heads = wrapped(model)
    assert repr(heads).startswith("8 heads in 4 blocks")
    small = heads.without(gone)
    assert apart(small.model, shut(model, [2 * n + h for n, own in gone.items() for h in own])) < 1e-12
    places = [sorted(c for unit in block.columns for c in unit) for block in small.by_name.values()]
    assert [places[n] + places[n + 1] for n in (0, 2)] == [
        [*range(K * (4 - sum(len(gone.get(n + m, ())) for m in (0, 1))))] for n in (0, 2)
    ]


class Literal(Layer):
    """The layer of the course with the number of heads written out."""

    def fold(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], 4, 4).transpose(1, 2).flatten(0, 1)


def test_a_model_is_pruned_again_where_an_earlier_removal_left_one_head() -> None:
    model = made(Literal).double()
    small = wrapped(model).prune(mask={0: [0], 1: [0, 1, 2]})
    heads = wrapped(small)
    assert repr(heads) == "4 heads in 2 blocks, all with an effect, all removable"
    gone = {0: [0, 1], 1: [0, 1, 2]}  # heads keep their numbers
    assert apart(heads.prune(mask={0: [1]}), closed(model, ["layers.0.W_o", "layers.1.W_o"], gone)) < 1e-12
