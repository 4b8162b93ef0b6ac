"""The steps shown are the steps taken."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch
from torch import Tensor

from mhaprune.attention.gates import Softmax
from mhaprune.attention.layer import MultiHeadAttention, causal_bias, padding_bias
from mhaprune.experiments.anatomy import walkthrough
from mhaprune.experiments.anatomy.walkthrough import (
    LayerCall,
    head_by_head,
    largest_difference,
    steps_table,
    values_table,
    walk,
)


@pytest.fixture
def calls() -> dict[str, LayerCall]:
    """Self-attention with padding, causal, and sizes that differ, with unequal gates; float64."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 4, gate=Softmax(init="rand")).double()
    other = MultiHeadAttention(8, 4, qdim=5, kdim=7, vdim=3, gate=Softmax(init="rand")).double()
    for one in (layer, other):
        for parameter in one.parameters():
            torch.nn.init.normal_(parameter)
    x = torch.randn(3, 6, 8, dtype=torch.double)
    padding = padding_bias(torch.arange(6) >= torch.tensor([[6], [4], [2]]), torch.double)
    causal = causal_bias(6, 6, torch.double, torch.device("cpu"))[None, None]
    sizes = [torch.randn(2, 4, 5), torch.randn(2, 6, 7), torch.randn(2, 6, 3)]
    return {
        "padded": LayerCall(layer, x, x, x, padding),
        "causal": LayerCall(layer, x, x, x, causal),
        "sizes of its own": LayerCall(other, *(tensor.double() for tensor in sizes)),
    }


@pytest.mark.parametrize("which", ["padded", "causal", "sizes of its own"])
def test_steps_layer_and_heads_one_by_one_are_the_same(calls: dict[str, LayerCall], which: str) -> None:
    call = calls[which]
    output, _ = call.layer(call.query, call.key, call.value, attn_mask=call.bias)
    torch.testing.assert_close(walk(call)[-1].value, output)
    torch.testing.assert_close(head_by_head(call), output)
    assert largest_difference(call) < 1e-12


@pytest.mark.parametrize("name", ["walk", "head_by_head"])
def test_each_way_is_held_against_the_layer(
    calls: dict[str, LayerCall], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With one of the two on another value, only that one differs."""
    plain = getattr(walkthrough, name)
    monkeypatch.setattr(walkthrough, name, lambda call: plain(call._replace(value=call.value + 1)))
    assert largest_difference(calls["padded"]) > 1e-3


def test_a_query_that_may_look_at_nothing_and_a_layer_without_biases(calls: dict[str, LayerCall]) -> None:
    call = calls["padded"]
    assert call.bias is not None
    nothing = call.bias.expand(-1, -1, 6, -1).clone()
    nothing[1, :, 2] = -math.inf
    assert largest_difference(call._replace(bias=nothing)) < 1e-12
    bare = MultiHeadAttention(8, 4, bias=False).double()
    assert largest_difference(call._replace(layer=bare)) < 1e-12


def test_a_difference_is_noticed(calls: dict[str, LayerCall], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that forgets to divide by the root of the head's size."""

    def undivided(self: MultiHeadAttention, query: Tensor, *arguments: object, **named: object) -> object:
        return plain(self, query * math.sqrt(self.head_dim), *arguments, **named)  # type: ignore[arg-type]

    plain = MultiHeadAttention.attend
    monkeypatch.setattr(MultiHeadAttention, "attend", undivided)
    assert largest_difference(calls["padded"]) > 1e-3


def test_the_worked_example_of_the_textbooks() -> None:
    """X of shape (3, 6, 8), four heads of two: split, attention, merge and output by a plain loop over heads."""
    torch.manual_seed(1)
    X = torch.randn(3, 6, 8, dtype=torch.double)
    layer = MultiHeadAttention(8, 4, bias=False).double()
    steps = {step.name: step.value for step in walk(LayerCall(layer, X, X, X))}
    assert steps["queries"].shape == (3, 6, 8)
    assert steps["queries, split"].shape == (3, 4, 6, 2)
    assert steps["scores"].shape == steps["weights"].shape == (3, 4, 6, 6)
    assert steps["head outputs"].shape == (3, 4, 6, 2)
    assert steps["gate"].shape == (1, 4, 1, 1)
    assert steps["merged heads"].shape == steps["output"].shape == (3, 6, 8)
    outputs = []
    for b in range(3):
        heads = []
        for n in range(4):
            Q, K, V = (
                X[b] @ projection.weight[2 * n : 2 * n + 2].T
                for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
            )
            torch.testing.assert_close(steps["queries, split"][b, n], Q)
            A = torch.stack([torch.stack([(q * k).sum() / math.sqrt(2) for k in K]).softmax(dim=0) for q in Q])
            torch.testing.assert_close(steps["weights"][b, n], A)
            torch.testing.assert_close(steps["head outputs"][b, n], A @ V)
            heads.append(A @ V)
        merged = torch.cat(heads, dim=1)
        torch.testing.assert_close(steps["merged heads"][b], merged)
        outputs.append(merged @ layer.out_proj.weight.T)
    torch.testing.assert_close(steps["output"], torch.stack(outputs))
    torch.testing.assert_close(layer(X, X, X)[0], torch.stack(outputs))


def test_the_table_gives_every_shape_in_symbols_and_numbers(calls: dict[str, LayerCall]) -> None:
    call = calls["sizes of its own"]
    table = steps_table(walk(call)).set_index("tensor")
    sizes = {"B": 2, "T": 4, "U": 6, "H": 4, "K": 2, "D": 8, "H·K": 8, "qdim": 5, "kdim": 7, "vdim": 3, "1": 1}
    for _, row in table.iterrows():
        assert row["shape"] == " × ".join(str(sizes[axis]) for axis in row["axes"].split(" × "))
    assert list(table["step"]) == list(range(1, len(table) + 1))


def test_the_values_are_those_of_the_first_example_and_the_head(calls: dict[str, LayerCall]) -> None:
    steps = walk(calls["causal"])
    values = values_table(steps, head=2)
    for number, step in enumerate(steps, 1):
        mine = values[values["step"] == number].pivot(index="row", columns="column", values="value")
        expected = step.value[0, 2] if "H" in step.axes else step.value[0]
        if step.name == "gate":
            expected = step.value[0, 2]
        pd.testing.assert_frame_equal(mine, pd.DataFrame(expected.tolist()), check_names=False, check_dtype=False)
