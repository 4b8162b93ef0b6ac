"""Tensors that hold a number for each head: they lose the numbers of removed heads."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhaprune
from mhaprune.api.wrap import Heads
from mhaprune.discovery.per_head_tensors import dimensions_of_heads
from support.attention import close_by_hooks

D, H, T = 16, 4, 4
"""As many positions as heads, so that a size alone does not tell a dimension of heads."""


class Attention(nn.Module):
    """Attention with slopes, a factor and an input-dependent bias for each head, and a bias that it is given."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = H, D // H
        self.made, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.forget = nn.Linear(D, H)
        self.factor = nn.Parameter(torch.rand(H, 1, 1) + 0.5)
        self.register_buffer("slopes", torch.rand(H), persistent=False)

    def forward(self, x: Tensor, bias: Tensor, distance: Tensor) -> Tensor:
        parts = self.made(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        scores = query @ key.transpose(-1, -2) * self.factor - self.slopes[:, None, None] * distance
        scores = scores + bias + self.forget(x).transpose(1, 2).unsqueeze(-2)
        return self.out((scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """Two layers that share a bias by position and head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.table = nn.Embedding(T, H)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        distance = (place[:, None] - place).abs()
        bias = self.table(distance).permute(2, 0, 1)
        for layer in self.layers:
            x = x + layer(x, bias, distance=distance.to(x))
        return x


@pytest.fixture(scope="module")
def heads() -> Heads:
    torch.manual_seed(0)
    return mhaprune.wrap(Net().eval(), mhaprune.losses.drift, score=[torch.randn(3, T, D)])


def masked(heads: Heads, removed: dict[int, list[int]], x: Tensor) -> Tensor:
    """The output of the dense model, with heads silenced by hooks that know nothing of blocks."""
    model: Any = copy.deepcopy(heads.subject.module)
    close_by_hooks([layer.out for layer in model.layers], D // H, removed)
    output: Tensor = model(x)
    return output


@torch.no_grad()
def test_removed_is_masked_once_and_twice_also_as_a_copy_from_a_file_compiled_and_exported(
    heads: Heads, tmp_path: Path
) -> None:
    x = torch.randn(5, T, D)
    small = mhaprune.wrap(heads.prune(mask={0: [0, 2], 1: [1, 2, 3]}), mhaprune.losses.drift, score=[x])
    again: Any = small.prune(mask={0: [3]})
    torch.save(again, file := io.BytesIO())
    file.seek(0)
    expected = masked(heads, {0: [0, 2, 3], 1: [1, 2, 3]}, x)
    compiled = torch.compile(again, backend="eager", fullgraph=True)
    for model in (again, copy.deepcopy(again), torch.load(file, weights_only=False), compiled):
        torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(small.subject.module(x), masked(heads, {0: [0, 2], 1: [1, 2, 3]}, x))
    mhaprune.export(again, tmp_path / "again.pt2", x)
    exported: Any = torch.export.load(tmp_path / "again.pt2").module()
    torch.testing.assert_close(exported(x[:2]), expected[:2])
    assert [layer.slopes.shape for layer in again.layers] == [layer.factor.shape[:1] for layer in again.layers]
    assert [layer.forget.out_features for layer in again.layers] == [1, 1]


class Core(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.bmm(torch.baddbmm(query.new_zeros(1), query, key.mT).softmax(dim=-1), value)


class Flat(nn.Module):
    """Attention in a module of its own, whose inputs have one dimension for examples and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.core, self.out = nn.Linear(D, 3 * D), Core(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.made(x).unflatten(-1, (3, -1, D // H)).transpose(1, 3).flatten(0, 1).unbind(1)
        out: Tensor = self.out(self.core(*parts).unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2))
        return out


class Joint(nn.Module):
    """Fused queries, keys and values whose bias has a part that is not learned."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = H, nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.q_bias, self.v_bias = nn.Parameter(torch.rand(D)), nn.Parameter(torch.rand(D))
        self.register_buffer("k_bias", torch.zeros(D), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.q_bias, self.k_bias, self.v_bias])
        made = F.linear(x, weight=self.qkv.weight, bias=bias).unflatten(-1, (3, -1, D // H))
        heads = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in made.unbind(2)))
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize("kind", [Flat, Joint])
@torch.no_grad()
def test_heads_behind_a_flat_dimension_or_a_joint_bias_are_found_and_removed(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(kind(), kind()).eval()
    small: Any = mhaprune.wrap(model, mhaprune.losses.drift, score=[torch.randn(2, T, D)]).prune(
        mask={0: [1], 1: [0, 3]}
    )
    close_by_hooks([layer.out for layer in model], D // H, {0: [1], 1: [0, 3]})
    for examples in (1, H, 2 * H):
        x = torch.randn(examples, T, D)
        torch.testing.assert_close(small(x), model(x))


def test_a_search_for_numbers_leaves_the_model_as_it_was(heads: Heads) -> None:
    model: Any = heads.subject.module
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(layer.slopes.requires_grad for layer in model.layers)
    assert [block.numbers for block in heads.subject.blocks] == [
        ((f"layers.{n}.factor", -3), (f"layers.{n}.slopes", -1)) for n in range(2)
    ]
    assert [block.inputs for block in heads.subject.blocks] == [((1, -3),)] * 2


class Counting(Net):
    """A net with a norm over the batch, and with a parameter that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(D), nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.mT).mT)


class Writing(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_tensors_that_take_no_gradients_are_no_obstacle() -> None:
    x = torch.randn(3, T, D)
    assert repr(mhaprune.wrap(Counting().eval(), mhaprune.losses.drift, score=[x])).endswith("all removable")
    heads = mhaprune.wrap(Writing().eval(), mhaprune.losses.drift, score=[x])
    mask = {0: [1], 1: [0, 2]}  # the tensors of all heads are not found: those that are left read their parts
    small = heads.prune(mask=mask)
    with torch.no_grad(), heads.closed(mask) as closed:
        torch.testing.assert_close(small(x), closed(x))


def test_a_tensor_that_all_heads_read_has_no_dimension_of_heads() -> None:
    of_heads, of_positions, of_both = (torch.rand(shape).requires_grad_() for shape in ((H, 1, 1), (T, 1), (H, T, 1)))
    context = (of_heads * of_positions * of_both).expand(2, H, T, 3)
    assert dimensions_of_heads([context], [of_heads, of_positions, of_both])[0] == [-3, None, -3]
    assert dimensions_of_heads([context[:, :1]], [of_heads]) == ([None], True)
    assert dimensions_of_heads([context.detach()], [of_heads]) == ([None], True)
