"""Weights that a layer hands to functions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from mhaprune.hooks.products import WeightProduct, places_of
from mhaprune.surgery.handed_weights import with_called_maps
from support.own_layers import HEADS, WIDTH, Layer, apart, called, check, made

K = WIDTH // HEADS


class ByFunction(Layer):
    """`F.multi_head_attention_forward` with the weights of modules that are not called."""

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


class Multiplied(Layer):
    """Products with weights, to which the layer adds the biases itself; one map is called without its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q = self.fold(x @ self.W_q.weight.t() + self.W_q.bias)
        k, v = self.fold(F.linear(x, self.W_k.weight)), self.fold(self.W_v(x))
        said = ((q @ k.mT).softmax(-1) @ v).unflatten(0, (-1, self.num_heads))
        return torch.einsum("bte,de->btd", said.transpose(1, 2).flatten(2), self.W_o.weight) + self.W_o.bias


KINDS = [ByFunction, Causal, Concatenated, Packed, Handed, Multiplied]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_found_removed_saved_and_read_again(kind: Any, tmp_path: Path) -> None:
    check(kind, tmp_path)


def test_a_product_is_that_of_a_module_only_by_its_whole_weight_in_its_order() -> None:
    module, computed = nn.Linear(4, 4), weight_norm(nn.Linear(4, 4))
    modules, x = places_of([module, computed]), torch.randn(2, 3, 4)
    assert {*modules.values()} == {module}

    def of(*given: Any, function: Any = torch.matmul) -> set[Any]:
        return {each.module_of(modules) for each in WeightProduct.of(function, given, {})} - {None}

    assert of(x, module.weight.T) == {module}
    assert not of(x, module.weight)
    assert not of(x, module.weight[:, :3].T) | of(x, computed.weight.T) | of(x, module.weight.detach().clone().T)
    assert of(x, module.weight, function=F.linear) == {module}


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
    ours = with_called_maps(called(model))
    assert ours is not model
    assert apart(ours, model) < 1e-6
