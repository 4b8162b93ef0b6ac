"""Attention whose weights no softmax makes: elementwise functions of the products of queries and keys."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mhaprune.hooks.attention_calls import AttentionCalls, attention_in_window
from support import attention
from support.own_layers import Layer, check


class Elementwise(Layer):
    """Each weight is a function of its score alone."""

    def weigh(self, scores: Tensor, v: Tensor) -> Tensor:
        return torch.sigmoid(scores - 2) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        return self.W_o(self.weigh(q @ k.mT, v).transpose(1, 2).flatten(2))


class Relu(Elementwise):
    """Wortsman et al. 2023: divided by the number of keys. A query may see nothing."""

    def weigh(self, scores: Tensor, v: Tensor) -> Tensor:
        return F.relu(scores) / scores.shape[-1] @ v


class SumsLater(Elementwise):
    """A softmax that is divided by its sums behind the values, as in kernels that go block by block."""

    def weigh(self, scores: Tensor, v: Tensor) -> Tensor:
        raised = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        return raised @ v / raised.sum(dim=-1, keepdim=True)


class OneMore(Elementwise):
    """Exponentials divided by one more than their sum: a head may say nothing."""

    def weigh(self, scores: Tensor, v: Tensor) -> Tensor:
        raised = scores.exp()
        return raised / (1 + raised.sum(dim=-1, keepdim=True)) @ v


@pytest.mark.parametrize("kind", [Elementwise, Relu, SumsLater, OneMore])
def test_heads_without_a_softmax_are_cut(kind: Any, tmp_path: Path) -> None:
    check(kind, tmp_path)


class OfEachHead(nn.Module):
    """Feed-forward layers with weights for each head, whose hidden numbers are no weights of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(attention.HEADS, attention.HEAD_DIM, 7) / 3)
        self.down = nn.Parameter(torch.randn(attention.HEADS, 7, attention.HEAD_DIM) / 3)
        self.make, self.W_o = (nn.Linear(attention.WIDTH, attention.WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.make(x).unflatten(-1, (attention.HEADS, -1)).transpose(1, 2)
        out: Tensor = self.W_o((F.relu(parts @ self.up) @ self.down).transpose(1, 2).flatten(2))
        return out


def test_feed_forward_layers_in_each_head_are_no_attention() -> None:
    heads = attention.wrapped(attention.Attention, OfEachHead)
    assert {block.path for block in heads.subject.blocks} == {"layers.0"}


def test_other_products_of_what_is_not_negative_are_no_attention() -> None:
    """A feed-forward layer by parameters, and weights that are summed over the queries."""
    seen: list[Any] = []

    def through(attend: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Any:
        seen.append(options)
        return attend(query, key, value)

    x, up, down = torch.randn(2, 5, 4), torch.randn(4, 6), torch.randn(6, 4)
    with AttentionCalls(through):
        _ = torch.einsum("bte,ed->btd", F.relu(torch.einsum("btd,de->bte", x, up)), down)
        _ = torch.einsum("btu,btk->buk", F.relu(x @ x.mT), x)
        assert not seen
        _ = F.relu(x @ x.mT) @ x
    assert [each["of_product"] for each in seen] == [True]


def test_no_window_is_computed_where_weights_may_have_any_sum() -> None:
    """Nothing says whether what is left of them would have the same sum."""

    class Causal(attention.Attention):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.sigmoid(q @ k.mT).tril() @ v

    refused = pytest.raises(ValueError, match=r"^a: its weights are of no softmax, so what a head says of a window is")
    model = nn.ModuleDict({"a": Causal()})
    with attention_in_window(model, ["a"], (1, 2)), refused:
        model["a"](attention.X)
