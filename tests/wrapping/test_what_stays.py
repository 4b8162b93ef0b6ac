"""Properties of a model that a removal of heads leaves as they were: what is frozen, shared, silent, or the user's."""

import copy
import io
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhaprune
from mhaprune.surgery.torch_attention import converted
from support.attention import WIDTH, Attention, Stack, X, pruned, square, wrapped


def own(seed: int = 0) -> Any:
    return Stack(Attention, Attention, Attention, seed=seed)


def weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def layers(frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().requires_grad_(not frozen)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("make", [layers, lambda frozen: own().requires_grad_(not frozen)], ids=["torch", "own"])
def test_frozen_weights_stay_frozen_and_others_do_not(make: Any, frozen: bool, tmp_path: Path) -> None:
    with torch.no_grad():  # which must not freeze anything by itself
        small = wrapped(make(frozen)).prune(mask={0: [1]})
    assert {weight.requires_grad for weight in small.parameters()} == {not frozen}
    mhaprune.save(small, tmp_path / "small")
    again = mhaprune.load(tmp_path / "small", model=make(frozen))
    assert {weight.requires_grad for weight in again.parameters()} == {not frozen}


def test_a_layer_keeps_what_is_frozen_and_what_is_shared() -> None:
    layer = mhaprune.MultiHeadAttention(WIDTH, 4)
    layer.k_proj.weight = layer.q_proj.weight
    layer.v_proj.weight.requires_grad_(False)
    layer.out_proj.weight.requires_grad_(False)
    layer.keep_heads([0, 3])
    assert layer.k_proj.weight is layer.q_proj.weight
    asks = [name for name, weight in layer.named_parameters() if not weight.requires_grad]
    assert asks == ["v_proj.weight", "out_proj.weight"]


@pytest.mark.parametrize("kept", [[9], [-1], [0, 0]])
def test_a_layer_refuses_heads_that_it_has_not(kept: list[int]) -> None:
    layer = mhaprune.MultiHeadAttention(WIDTH, 4)
    with pytest.raises(ValueError, match=r"^kept=\[.*\]: must be different numbers from 0 to 3$"):
        layer.keep_heads(kept)
    assert layer.num_heads == 4


def tie(model: Any, *names: str) -> Any:
    for name in names:
        getattr(model.layers[1], name).weight = getattr(model.layers[0], name).weight
    return model


@pytest.mark.parametrize("names", ["qkvo", "o", "q"])
def test_shared_weights_stay_shared_when_they_are_cut_alike(names: str, tmp_path: Path) -> None:
    model = tie(own(), *names)
    heads = wrapped(model)
    small = heads.prune(mask={0: [2], 1: [2]})
    assert all(getattr(small.layers[0], n).weight is getattr(small.layers[1], n).weight for n in names)
    assert weights(small) < weights(model)
    mhaprune.save(small, tmp_path / "small")
    again: Any = mhaprune.load(tmp_path / "small", model=tie(own(seed=1), *names))
    assert torch.equal(again(X), small(X))
    assert weights(again) == weights(small)


def test_queries_and_keys_may_be_one() -> None:
    model = own()
    for layer in model.layers:
        layer.k.weight = layer.q.weight
    small = wrapped(model).prune(mask={0: [2], 2: [0, 1]})
    assert all(layer.k.weight is layer.q.weight for layer in small.layers)
    assert [len(layer.q.weight) for layer in small.layers] == [24, 32, 16]


def test_shared_weights_that_would_become_two_are_refused() -> None:
    heads = wrapped(tie(own(), *"qkvo"))
    with pytest.raises(ValueError, match="are one weight, remove the same heads from both"):
        heads.prune(mask={0: [2], 1: [3]})


def test_attention_of_torch_stays_shared() -> None:
    model = nn.Module()
    model.first, model.second = (nn.MultiheadAttention(WIDTH, 4) for _ in range(2))
    model.again = model.first
    model.second.in_proj_weight = model.first.in_proj_weight
    with torch.no_grad():
        found: Any = converted(model)
    assert found.again is found.first
    assert found.second.layer.q_proj.weight is found.first.layer.q_proj.weight
    assert found.second.layer.q_proj.weight.requires_grad


@pytest.mark.parametrize("way", ["itself", "deepcopy", "pickle", "saved"])
def test_a_silent_head_stays_silent_in_any_training(way: str, tmp_path: Path) -> None:
    """Momentum and weight decay do not wake it, nor does a weight that is set by hand."""
    small = wrapped(own()).prune(mask={0: [0, 1, 2, 3], 1: [1]})
    if way == "deepcopy":
        small = copy.deepcopy(small)
    elif way == "pickle":
        torch.save(small, data := io.BytesIO())
        small = torch.load(io.BytesIO(data.getvalue()), weights_only=False)
    elif way == "saved":
        mhaprune.save(small, tmp_path / "small")
        small = mhaprune.load(tmp_path / "small", model=own(seed=1))
    out = small.layers[0].o
    optimiser = torch.optim.SGD(small.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        small(X).square().mean().backward()
        optimiser.step()
    assert not out.weight.any()
    with torch.no_grad():
        before = small(X)
        out.weight.fill_(1.0)
        assert torch.equal(small(X), before)
    assert "3 heads" not in repr(wrapped(small)).split(" in ")[1]
    assert len(wrapped(small).grid) == 7


@pytest.fixture
def llama() -> Any:
    pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    from tiny_families import FAMILIES, make

    return make(FAMILIES["llama"])


IDS = torch.arange(24).reshape(2, 12) % 11
UNEVEN = {0: [1], 1: [0, 2, 3]}


def of_text(model: nn.Module, length: int = 4) -> Any:
    return mhaprune.wrap(model, lambda out, batch: square(out.logits, batch), score=[{"input_ids": IDS[:, :length]}])


def test_an_attention_function_of_the_users_is_kept(llama: Any) -> None:
    """It does something at the length of a text that the proof does not meet."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def mine(module: Any, q: Tensor, *others: Any, **named: Any) -> Any:
        out, weights = sdpa_attention_forward(module, q, *others, **named)
        return (out if q.shape[2] < 8 else out.sin()), weights

    AttentionInterface.register("mine", mine)
    AttentionMaskInterface.register("mine", sdpa_mask)
    llama.set_attn_implementation("mine")
    heads = of_text(llama)
    small = pruned(heads, UNEVEN, IDS)
    before = small(IDS).logits
    small.set_attn_implementation("sdpa")
    assert not torch.allclose(small(IDS).logits, before, atol=1e-6)
    small.set_attn_implementation("mine")
    assert torch.equal(small(IDS).logits, before)


def test_a_forward_of_the_users_is_kept() -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    config = transformers.BloomConfig(vocab_size=11, hidden_size=WIDTH, n_layer=2, n_head=4, initializer_range=0.2)
    torch.manual_seed(0)
    model = transformers.BloomForCausalLM(config).eval()

    def mine(self: Any, x: Tensor, *others: Any, **named: Any) -> Any:
        out, *rest = type(self).forward(self, x, *others, **named)
        return (out if x.shape[1] < 8 else out.sin()), *rest

    for layer in model.transformer.h:
        layer.self_attention.forward = MethodType(mine, layer.self_attention)
    pruned(of_text(model), UNEVEN, IDS)
