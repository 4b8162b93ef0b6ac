from __future__ import annotations

import pytest
import torch

from mhaprune.model.attention import MultiHeadAttention
from mhaprune.model.gates import Softmax
from mhaprune.model.surgery import remove_heads


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [0, 2, 3], [3, 1], [2], []])
def test_removed_equals_masked(kept: list[int], bias: bool) -> None:
    layer = MultiHeadAttention(8, 4, kdim=5, vdim=6, bias=bias, gate=Softmax()).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.head_mask[3] = 0.5
    q, k, v = (torch.randn(2, 3, size, dtype=torch.float64) for size in (8, 5, 6))
    gates = torch.zeros(4).index_fill(0, torch.tensor(kept, dtype=torch.long), 1.0)
    masked, _ = layer(q, k, v, gates=gates)
    small = remove_heads(layer, kept)
    torch.testing.assert_close(small(q, k, v)[0], masked)
    assert small.num_heads == len(kept)
    assert small.gate is None
    assert small.q_proj.weight.shape == (2 * len(kept), 8)
    assert small.out_proj.weight.shape == (8, 2 * len(kept))


def test_the_original_is_left_alone_and_no_random_number_spent() -> None:
    layer = MultiHeadAttention(8, 4)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    state = torch.get_rng_state()
    small = remove_heads(layer, [1])
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        small.out_proj.weight.fill_(9.0)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_second_removal_counts_from_what_is_left() -> None:
    layer = MultiHeadAttention(8, 4)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(
        remove_heads(remove_heads(layer, [0, 2, 3]), [1, 2])(x, x, x)[0], remove_heads(layer, [2, 3])(x, x, x)[0]
    )


def test_an_empty_layer_can_lose_nothing_more() -> None:
    layer, x = MultiHeadAttention(8, 4), torch.randn(2, 3, 8)
    empty = remove_heads(layer, [])
    torch.testing.assert_close(remove_heads(empty, [])(x, x, x)[0], empty(x, x, x)[0])
