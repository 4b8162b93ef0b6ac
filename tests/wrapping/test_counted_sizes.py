"""Sizes in the code of a layer that count heads, groups, or their width, whatever they are called, and others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.own_layers import HEADS, WIDTH, Layer, check, closed, made, wrapped

K = WIDTH // HEADS


class SideBySide(Layer):
    """One map makes the key and the value of a group side by side, and a group has two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_key_value_heads = 2
        self.kv = nn.Linear(WIDTH, 2 * 2 * K)

    def forward(self, x: Tensor) -> Tensor:
        q = self.W_q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (self.num_key_value_heads, 2, K)).permute(3, 0, 2, 1, 4)
        k, v = (y.repeat_interleave(self.num_heads // self.num_key_value_heads, dim=1) for y in (k, v))
        return self.W_o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class WithQueries(Layer):
    """The queries of a group stand before its key and its value, as in the larger Falcons."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kv_heads, self.qkv = 2, nn.Linear(WIDTH, WIDTH + 2 * 2 * K)

    def forward(self, x: Tensor) -> Tensor:
        of_group = self.num_heads // self.num_kv_heads
        made = self.qkv(x).unflatten(-1, (self.num_kv_heads, of_group + 2, K)).permute(3, 0, 2, 1, 4)
        q = made[:-2].permute(1, 2, 0, 3, 4).flatten(1, 2)
        k, v = (y.repeat_interleave(of_group, dim=1) for y in made[-2:])
        return self.W_o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Near(nn.Module):
    """A part of a layer that counts its heads too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.weight = HEADS, nn.Embedding(2, HEADS)

    def forward(self, T: int) -> Tensor:
        places = torch.arange(T) // 2
        return self.weight((places[:, None] == places).long()).movedim(-1, 0).reshape(self.num_heads, T, T)


class AsManyGroups(Layer):
    """There are as many groups as heads of a group, and both are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_groups, self.heads_per_group, self.near = 2, 2, Near()
        self.W_k, self.W_v = nn.Linear(WIDTH, 2 * K), nn.Linear(WIDTH, 2 * K)

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.num_groups, self.heads_per_group
        q = self.W_q(x).unflatten(-1, (*sizes, K)).permute(0, 2, 3, 1, 4)
        k, v = (f(x).unflatten(-1, (self.num_groups, 1, K)).permute(0, 2, 3, 1, 4) for f in (self.W_k, self.W_v))
        scores = q @ k.mT + self.near(x.shape[1]).unflatten(0, sizes)
        return self.W_o((scores.softmax(-1) @ v).permute(0, 3, 1, 2, 4).flatten(2))


class OtherNames(Layer):
    """Heads and groups are counted by names of any kind, and queries are viewed as those of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.n_q, self.n_kv = HEADS, 2
        self.W_k, self.W_v = nn.Linear(WIDTH, 2 * K), nn.Linear(WIDTH, 2 * K)
        del self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        q = self.W_q(x).unflatten(-1, (self.n_kv, self.n_q // self.n_kv, K))
        k, v = (f(x).unflatten(-1, (self.n_kv, K)) for f in (self.W_k, self.W_v))
        weights = torch.einsum("btghd,bsgd->bghts", q, k).softmax(-1)
        return self.W_o(torch.einsum("bghts,bsgd->btghd", weights, v).flatten(2))


class FoldedChannels(Layer):
    """Heads are folded into the examples, beside channels that come before positions."""

    def __init__(self) -> None:
        super().__init__()
        self.nh, self.qkv = HEADS, nn.Conv1d(WIDTH, 3 * WIDTH, 1)
        del self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv(x.mT).reshape(B * self.nh, 3 * K, T).split(K, 1)
        said = v @ (q.mT @ k).softmax(-1).mT
        return self.W_o(said.reshape(B, -1, T).mT)


class OfPixels(Layer):
    """Positions are the pixels of a picture: heads before them, and then channels before rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.W_o = nn.Conv2d(WIDTH, 3 * WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = (image := torch.stack([x.mT, x.mT.flip(2)], dim=2)).shape
        q, k, v = self.qkv(image).view(B, self.num_heads, 3 * K, H * W).split(K, dim=2)
        said = (v @ (q.mT @ k).softmax(-1).mT).view(B, C, H, W)
        return self.W_o(said).mean(2).mT


class ByLiterals(Layer):
    """Heads are folded into the examples and taken apart by numbers in the code, which fit other numbers too."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        maps = self.W_q, self.W_k, self.W_v
        q, k, v = (f(x).view(B, T, 4, K).transpose(1, 2).reshape(-1, T, K) for f in maps)
        said = ((q @ k.mT).softmax(-1) @ v).view(-1, 4, T, K)
        return self.W_o(said.transpose(1, 2).reshape(-1, T, WIDTH))


class Sinks(Layer):
    """A learned number for each head takes a part of its weights, as in gpt-oss."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, K)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(len(x), -1, x.shape[1], 1)
        weights = torch.cat([q @ k.mT, sinks], dim=-1).softmax(-1)[..., :-1]
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "kind",
    [SideBySide, WithQueries, AsManyGroups, OtherNames, FoldedChannels, ByLiterals, OfPixels, Sinks],
)
def test_heads_are_removed_exactly(kind: Any, tmp_path: Path) -> None:
    check(kind, tmp_path)


@pytest.mark.parametrize("kind", [ByLiterals, OfPixels, Sinks])
def test_as_many_examples_and_positions_as_heads_are_no_heads(kind: Any) -> None:
    model, gone = made(kind).double(), {0: [0, 1], 1: [0, 2, 3]}
    small, shut = wrapped(model).prune(mask=gone), closed(model, ["layers.0.W_o", "layers.1.W_o"], gone)
    for shape in ((2, 5), (2, HEADS), (HEADS, 7), (HEADS, HEADS), (1, 1), (3, 1)):
        x = torch.randint(20, shape)
        torch.testing.assert_close(small(x), shut(x), atol=1e-9, rtol=0)
