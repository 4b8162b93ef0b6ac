from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhaprune.attention.gates import Softmax
from mhaprune.attention.layer import MultiHeadAttention, causal_bias, padding_mask

B, T, U, D, H = 3, 5, 7, 12, 4


def twins(kdim: int = D, vdim: int = D, bias: bool = True) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Ours and torch's with the same weights; no bias or weight is at a value that could hide a fault."""
    ours = MultiHeadAttention(D, H, kdim=kdim, vdim=vdim, bias=bias)
    peer = nn.MultiheadAttention(D, H, kdim=kdim, vdim=vdim, bias=bias, batch_first=True)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()
        weights = [ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]
        if peer.in_proj_weight is not None:
            peer.in_proj_weight.copy_(torch.cat(weights))
        else:
            for name, weight in zip("qkv", weights, strict=True):
                getattr(peer, f"{name}_proj_weight").copy_(weight)
        peer.out_proj.weight.copy_(ours.out_proj.weight)
        if bias:
            peer.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias]))
            peer.out_proj.bias.copy_(ours.out_proj.bias)
    return ours.double(), peer.double()


def assert_equal(
    ours: MultiHeadAttention, peer: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, **masks
) -> None:
    is_causal = masks.pop("is_causal", False)
    theirs = dict(masks)
    if is_causal:
        theirs["attn_mask"] = causal_bias(T, k.shape[1], q.dtype, q.device)
        # torch wants one kind of mask
        if "key_padding_mask" in masks:
            theirs["attn_mask"] = theirs["attn_mask"].bool()
    expected, expected_weights = peer(q, k, v, average_attn_weights=False, **theirs)
    plain, none = ours(q, k, v, is_causal=is_causal, **masks)
    explicit, weights = ours(q, k, v, is_causal=is_causal, need_weights=True, **masks)
    assert none is None
    torch.testing.assert_close(plain, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(explicit, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("settings", "keys", "masks"),
    [
        ({}, (D, D), {}),
        ({"bias": False}, (D, D), {}),
        ({"kdim": 6, "vdim": 9}, (6, 9), {}),
        ({}, (D, D), {"key_padding_mask": padding_mask(torch.tensor([7, 1, 4]), U)}),
    ],
    ids=["plain", "no bias", "sizes of its own", "padding"],
)
def test_cross_attention_equals_torch(
    settings: dict[str, Any], keys: tuple[int, int], masks: dict[str, Tensor]
) -> None:
    assert_equal(*twins(**settings), random(B, T, D), *(random(B, U, width) for width in keys), **masks)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("lengths", [None, [5, 2, 3]])
def test_self_attention_equals_torch(bias: bool, is_causal: bool, lengths: list[int] | None) -> None:
    x = random(B, T, D)
    masks = {"key_padding_mask": padding_mask(torch.tensor(lengths), T)} if lengths else {}
    assert_equal(*twins(bias=bias), x, x, x, is_causal=is_causal, **masks)


def test_float_and_boolean_masks_equal_torch() -> None:
    q, k = random(B, T, D), random(B, U, D)
    boolean = torch.rand(T, U) < 0.4
    boolean[:, 0] = False
    assert_equal(*twins(), q, k, k, attn_mask=boolean)
    assert_equal(*twins(), q, k, k, attn_mask=random(T, U))


def test_valid_lengths_per_query() -> None:
    ours, _ = twins()
    q, k = random(1, 2, D), random(1, U, D)
    lengths = torch.tensor([[3, 6]])
    out, weights = ours(q, k, k, attn_mask=padding_mask(lengths, U), need_weights=True)
    assert weights is not None
    for t, length in enumerate(lengths[0].tolist()):
        alone, _ = ours(q[:, t : t + 1], k[:, :length], k[:, :length])
        torch.testing.assert_close(out[:, t : t + 1], alone)
        assert (weights[:, :, t, length:] == 0).all()


def test_sizes_of_query_and_head_of_their_own() -> None:
    layer = MultiHeadAttention(10, 3, qdim=4, kdim=5, vdim=6, head_dim=2)
    out, weights = layer(torch.randn(B, T, 4), torch.randn(B, U, 5), torch.randn(B, U, 6), need_weights=True)
    assert out.shape == (B, T, 10)
    assert weights is not None
    assert weights.shape == (B, 3, T, U)


def test_a_query_without_any_key_gets_zeros_on_both_paths() -> None:
    ours, _ = twins()
    q, k = random(2, T, D), random(2, U, D)
    nothing = padding_mask(torch.tensor([0, 3]), U)
    for need_weights in (False, True):
        out, _ = ours(q, k, k, key_padding_mask=nothing, need_weights=need_weights)
        torch.testing.assert_close(out[0], ours.out_proj.bias.expand(T, D))
        assert torch.isfinite(out).all()


def test_a_query_without_any_key_has_finite_gradients_on_both_paths() -> None:
    ours, _ = twins()
    q, k = random(2, T, D).requires_grad_(), random(2, U, D).requires_grad_()
    nothing = padding_mask(torch.tensor([0, 3]), U)
    wanted = [q, k, *(parameter for name, parameter in ours.named_parameters() if "bias" not in name)]
    plain, explicit = (
        torch.autograd.grad(ours(q, k, k, key_padding_mask=nothing, need_weights=asked)[0].square().sum(), wanted)
        for asked in (False, True)
    )
    for one, other in zip(plain, explicit, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(other, one)
    assert (explicit[0][0] == 0).all(), "what attends to nothing does not depend on its query"


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_float_mask_may_be_of_another_precision(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    ours, x = twins()[0].to(dtype), random(B, T, D).to(dtype)
    mask = random(T, T).to(mask_dtype)
    mask[1, 2:] = -torch.inf
    for is_causal in (False, True):
        plain, _ = ours(x, x, x, attn_mask=mask, is_causal=is_causal)
        explicit, weights = ours(x, x, x, attn_mask=mask, is_causal=is_causal, need_weights=True)
        assert weights is not None
        assert plain.dtype == explicit.dtype == weights.dtype == dtype
        tolerance = 0.05 * plain.abs().max().item()
        torch.testing.assert_close(explicit, plain, atol=tolerance, rtol=0)
        precise, _ = copy.deepcopy(ours).double()(*3 * [x.double()], attn_mask=mask.double(), is_causal=is_causal)
        torch.testing.assert_close(plain.double(), precise, atol=tolerance, rtol=0)


def test_open_gates_change_nothing_and_every_gate_matters() -> None:
    ours, _ = twins()
    x = random(B, T, D)
    full, _ = ours(x, x, x)
    torch.testing.assert_close(ours(x, x, x, gates=torch.ones(H))[0], full)
    torch.testing.assert_close(ours(x, x, x, gates=torch.ones(B, H))[0], full)
    for head in range(H):
        gates = torch.ones(H).index_fill(0, torch.tensor(head), 0.0)
        assert (ours(x, x, x, gates=gates)[0] - full).abs().max() > 1e-3


def test_gates_per_example_are_each_example_alone() -> None:
    ours, _ = twins()
    x, gates = random(B, T, D), torch.rand(B, H, dtype=torch.float64)
    together, _ = ours(x, x, x, gates=gates)
    for b in range(B):
        alone, _ = ours(x[b : b + 1], x[b : b + 1], x[b : b + 1], gates=gates[b])
        torch.testing.assert_close(together[b : b + 1], alone)


def test_mask_gate_and_argument_multiply_the_same_quantity() -> None:
    ours, _ = twins()
    gated = MultiHeadAttention(D, H, gate=Softmax()).double()
    gated.load_state_dict(ours.state_dict(), strict=False)
    x = random(B, T, D)
    logits, argument = torch.randn(H, dtype=torch.float64), torch.rand(H, dtype=torch.float64)
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    with torch.no_grad():
        gated.gate.logits.copy_(logits)  # type: ignore[union-attr]
    gated.head_mask.copy_(mask)
    expected, _ = ours(x, x, x, gates=H * logits.softmax(0) * mask * argument)
    torch.testing.assert_close(gated(x, x, x, gates=argument)[0], expected)


def test_without_heads_only_the_bias_is_left() -> None:
    empty = MultiHeadAttention(D, 0, head_dim=3)
    nn.init.normal_(empty.out_proj.bias)
    x = torch.randn(B, T, D)
    for need_weights in (False, True):
        out, _ = empty(x, x, x, need_weights=need_weights)
        torch.testing.assert_close(out, empty.out_proj.bias.expand(B, T, D))


def test_dropout_acts_in_training_only_and_on_both_paths() -> None:
    layer = MultiHeadAttention(D, H, dropout=0.5)
    x = torch.randn(B, T, D)
    for need_weights in (False, True):
        outs = [layer.train()(x, x, x, need_weights=need_weights)[0] for _ in range(2)]
        assert not torch.equal(*outs)
        outs = [layer.eval()(x, x, x, need_weights=need_weights)[0] for _ in range(2)]
        torch.testing.assert_close(*outs)


def test_the_published_walk_through() -> None:
    """X of shape (3, 6, 8), four heads of two: the layer equals a plain loop over its heads."""
    layer = MultiHeadAttention(8, 4)
    x = torch.randn(3, 6, 8)
    out, _ = layer(x, x, x)
    heads = []
    for h in range(4):
        rows = slice(2 * h, 2 * h + 2)
        q, k, v = (x @ p.weight[rows].T + p.bias[rows] for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        heads.append((q @ k.mT / 2**0.5).softmax(-1) @ v)
    torch.testing.assert_close(out, torch.cat(heads, -1) @ layer.out_proj.weight.T + layer.out_proj.bias)


def in_torch_layer(kind: str, norm_first: bool = False) -> tuple[nn.Module, nn.Module]:
    """Two equal layers of torch.nn; in the first one the attention is ours."""
    make = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
    peer = make(D, H, 2 * D, dropout=0.0, batch_first=True, norm_first=norm_first).double()
    mine = copy.deepcopy(peer)
    for name in ("self_attn", "multihead_attn")[: 1 if kind == "encoder" else 2]:
        ours, theirs = twins()
        setattr(mine, name, ours)
        setattr(peer, name, theirs)
    return mine, peer


def masks_of_torch_layers() -> dict[str, dict[str, Any]]:
    causal, padding = causal_bias(T, T, torch.float64, torch.device("cpu")), padding_mask(torch.tensor([5, 2, 3]), T)
    per_head = torch.rand(B * H, T, T) < 0.4  # torch's kernel knows no float mask but one of 0 and -inf
    per_head[..., 0] = False
    return {
        "no mask": {},
        "padding": {"src_key_padding_mask": padding},
        "causal": {"src_mask": causal, "is_causal": True},
        "boolean causal": {"src_mask": causal.bool()},
        "both": {"src_mask": causal.bool(), "src_key_padding_mask": padding},
        "both, as floats": {"src_mask": causal, "src_key_padding_mask": torch.where(padding, -torch.inf, 0.0).double()},
        "a mask per head": {"src_mask": per_head},
    }


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masks", masks_of_torch_layers().values(), ids=masks_of_torch_layers())
def test_it_stands_in_an_encoder_layer_of_torch(masks: dict[str, Any], norm_first: bool) -> None:
    mine, peer = in_torch_layer("encoder", norm_first)
    x = random(B, T, D)
    for training, grad in ((True, True), (False, True), (False, False)):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(mine.train(training)(x, **masks), peer.train(training)(x, **masks))
    stack = nn.TransformerEncoder(mine, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        masks = {"mask" if name == "src_mask" else name: mask for name, mask in masks.items()}
        twice = nn.TransformerEncoder(peer, 2, enable_nested_tensor=False).eval()
        torch.testing.assert_close(stack(x, **masks), twice(x, **masks))


def test_it_stands_in_a_decoder_layer_of_torch() -> None:
    mine, peer = in_torch_layer("decoder")
    x, memory = random(B, T, D), random(B, U, D)
    causal = causal_bias(T, T, x.dtype, x.device)
    padding = torch.where(padding_mask(torch.tensor([7, 1, 4]), U), -torch.inf, 0.0).double()
    for masks in ({}, {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding}):
        for training in (True, False):
            with torch.set_grad_enabled(training):
                torch.testing.assert_close(
                    mine.train(training)(x, memory, **masks), peer.train(training)(x, memory, **masks)
                )


def test_a_closed_head_is_closed_in_a_layer_of_torch() -> None:
    """Also in evaluation, where torch's own kernel would compute from the weights and leave the mask out."""
    mine, peer = in_torch_layer("encoder")
    x = random(B, T, D)
    with torch.no_grad():
        mine.self_attn.head_mask[1] = 0.0
        peer.self_attn.out_proj.weight.unflatten(1, (H, -1))[:, 1] = 0.0
        for training in (True, False):
            closed = mine.train(training)(x)
            torch.testing.assert_close(closed, peer.train(training)(x))
        mine.self_attn.head_mask[1] = 1.0
        assert (mine(x) - closed).abs().max() > 1e-3
        mine.self_attn.keep_heads([0, 2, 3])
        torch.testing.assert_close(mine(x), closed)


def test_a_query_that_is_no_batch_is_refused() -> None:
    ours, _ = twins()
    x = random(T, D)
    with pytest.raises(ValueError, match=r"query of shape \(5, 12\): must be \(batch, queries, width\)"):
        ours(x, x, x)


@pytest.mark.parametrize("num_heads", [0, 5])
def test_heads_must_divide_the_width(num_heads: int) -> None:
    with pytest.raises(
        ValueError, match=f"num_heads={num_heads}: must divide embed_dim=12, so one of 1, 2, 3, 4, 6, 12"
    ):
        MultiHeadAttention(12, num_heads)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32])
@pytest.mark.parametrize("mask", ["key_padding_mask", "attn_mask"])
def test_a_mask_of_whole_numbers_is_refused_as_by_torch(mask: str, dtype: torch.dtype) -> None:
    x = torch.randn(1, 3, 8)
    values = torch.tensor([[0, 0, 1]]).to(dtype)
    given = {mask: values if mask == "key_padding_mask" else values.expand(3, 3)}
    with pytest.raises(ValueError, match=f"{mask} of {dtype}: must be torch.bool"):
        MultiHeadAttention(8, 2)(x, x, x, **given)
    with pytest.raises(AssertionError):
        nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, **given)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": (1, 4000, 8)}, r"value of shape \(1, 3, 8\): must be \(1, 4000, 8\)"),
        ({"value": (1, 2, 8)}, r"value of shape \(1, 2, 8\): must be \(1, 3, 8\)"),
        ({"key": (2, 3, 8)}, r"key of shape \(2, 3, 8\): must be \(1, 3, 8\)"),
        ({"key": (3, 8)}, r"key of shape \(3, 8\): must be"),
        ({"query": (1, 5, 4)}, r"query of shape \(1, 5, 4\): must be \(1, 5, 8\)"),
        ({"key_padding_mask": (3, 3)}, r"key_padding_mask of shape \(3, 3\): must be \(1, 3\)"),
        ({"attn_mask": (3, 4)}, r"attn_mask of shape \(3, 4\): must be \(5, 3\) or \(1, 5, 3\) or \(2, 5, 3\) or"),
        ({"gates": (3,)}, r"gates of shape \(3,\): must be \(2,\) or \(1, 2\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    change: dict[str, tuple[int, ...]], message: str, need_weights: bool
) -> None:
    shapes = {"query": (1, 5, 8), "key": (1, 3, 8), "value": (1, 3, 8)} | change
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(8, 2)(**{name: torch.zeros(s) for name, s in shapes.items()}, need_weights=need_weights)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("dropout", -1), ("dropout", 1), ("dropout", float("nan")), ("head_dim", 0), ("num_heads", -1), ("kdim", 0)],
)
def test_sizes_and_dropout_that_cannot_be_are_refused(setting: str, value: float) -> None:
    settings: Any = {"num_heads": 4, "head_dim": 16, setting: value}
    with pytest.raises(ValueError, match=f"{setting}={value}: must be "):
        MultiHeadAttention(64, **settings)
