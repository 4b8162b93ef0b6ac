import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhaprune.attention.gates import Softmax
from mhaprune.attention.layer import MultiHeadAttention, causal_bias, padding_bias
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sort import Sort

B, T, U, D, H = 3, 5, 7, 12, 4


def padding_mask(lengths: Sequence[int], keys: int) -> Tensor:
    """(B, U): True behind so many keys."""
    return torch.arange(keys) >= torch.tensor(lengths)[:, None]


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


def cross_masks() -> dict[str, dict[str, Tensor]]:
    boolean = torch.rand(T, U) < 0.4
    boolean[:, 0] = False
    return {
        "no mask": {},
        "padding": {"key_padding_mask": padding_mask([7, 1, 4], U)},
        "boolean": {"attn_mask": boolean},
        "float": {"attn_mask": random(T, U)},
    }


@pytest.mark.parametrize("masks", cross_masks().values(), ids=cross_masks())
@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"kdim": 6, "vdim": 9}], ids=["plain", "no bias", "sizes"])
def test_cross_attention_equals_torch(settings: dict[str, Any], masks: dict[str, Tensor]) -> None:
    keys, values = (random(B, U, settings.get(name, D)) for name in ("kdim", "vdim"))
    assert_equal(*twins(**settings), random(B, T, D), keys, values, **masks)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("lengths", [None, [5, 2, 3]])
def test_self_attention_equals_torch(bias: bool, is_causal: bool, lengths: list[int] | None) -> None:
    x = random(B, T, D)
    masks = {"key_padding_mask": padding_mask(lengths, T)} if lengths else {}
    assert_equal(*twins(bias=bias), x, x, x, is_causal=is_causal, **masks)


def test_keys_may_be_padding_query_by_query() -> None:
    ours, _ = twins()
    q, k, lengths = random(1, 2, D), random(1, U, D), [3, 6]
    out, weights = ours(q, k, k, attn_mask=padding_mask(lengths, U)[None], need_weights=True)
    assert weights is not None
    for t, length in enumerate(lengths):
        torch.testing.assert_close(out[:, t : t + 1], ours(q[:, t : t + 1], k[:, :length], k[:, :length])[0])
        assert (weights[:, :, t, length:] == 0).all()


def test_a_query_without_any_key_gets_zeros_and_finite_gradients_on_both_paths() -> None:
    ours, _ = twins()
    q, k = random(2, T, D).requires_grad_(), random(2, U, D).requires_grad_()
    wanted = [q, k, *(parameter for name, parameter in ours.named_parameters() if "bias" not in name)]
    gradients = []
    for need_weights in (False, True):
        out, _ = ours(q, k, k, key_padding_mask=padding_mask([0, 3], U), need_weights=need_weights)
        torch.testing.assert_close(out[0], ours.out_proj.bias.expand(T, D))
        gradients.append(torch.autograd.grad(out.square().sum(), wanted))
    for one, other in zip(*gradients, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(other, one)
    assert (gradients[1][0][0] == 0).all(), "what attends to nothing does not depend on its query"


@pytest.mark.parametrize(
    ("dtype", "mask_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.double), (torch.half, torch.bfloat16)],
)
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


@torch.no_grad()
def test_mask_gate_and_argument_multiply_what_a_head_writes() -> None:
    """For each example alone, as if the columns of W_O were multiplied by hand."""
    plain, _ = twins()
    gated = MultiHeadAttention(D, H, gate=Softmax()).double()
    gated.load_state_dict(plain.state_dict(), strict=False)
    x, gates_BH, mask = random(B, T, D), torch.rand(B, H, dtype=torch.float64), torch.tensor([1.0, 0.0, 0.5, 1.0])
    logits = gated.gate.logits.copy_(random(H))  # type: ignore[union-attr]
    gated.head_mask.copy_(mask)
    together, _ = gated(x, x, x, gates=gates_BH)
    for b, gates_H in enumerate(gates_BH):
        one, by_hand = x[b : b + 1], copy.deepcopy(plain)
        by_hand.out_proj.weight *= (H * logits.softmax(0) * mask * gates_H).repeat_interleave(D // H)
        expected, _ = by_hand(one, one, one)
        torch.testing.assert_close(together[b : b + 1], expected)
        torch.testing.assert_close(gated(one, one, one, gates=gates_H)[0], expected)


@torch.no_grad()
def head_by_head(layer: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output (B, T, D) as a sum over separate attentions, one per head, each with projections of its own.
    `bias` (B, 1, T, U) is added to the scores."""
    output = q.new_zeros(*q.shape[:2], layer.embed_dim) + layer.out_proj.bias
    for n, gate in enumerate(layer.head_scale()):
        part = slice(n * layer.head_dim, (n + 1) * layer.head_dim)
        of_q, of_k, of_v = (
            x @ projection.weight[part].mT + projection.bias[part]
            for x, projection in ((q, layer.q_proj), (k, layer.k_proj), (v, layer.v_proj))
        )
        scores = of_q @ of_k.mT / math.sqrt(layer.head_dim) + (0 if bias is None else bias[:, 0])
        output = output + gate * (scores.softmax(dim=-1) @ of_v) @ layer.out_proj.weight[:, part].mT
    return output


@pytest.mark.parametrize("case", ["padded", "causal", "sizes of its own"])
def test_one_wide_projection_is_as_many_small_ones(case: str) -> None:
    sizes = {"qdim": 5, "kdim": 6, "vdim": 9} if case == "sizes of its own" else {}
    layer = MultiHeadAttention(D, H, **sizes, gate=Softmax(init="rand")).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = random(B, T, D)
    inputs = (random(B, T, 5), random(B, U, 6), random(B, U, 9)) if sizes else (x, x, x)
    bias = {
        "padded": padding_bias(padding_mask([T, 4, 2], T), x.dtype),
        "causal": causal_bias(T, T, x.dtype, x.device)[None, None],
    }.get(case)
    output, _ = layer(*inputs, attn_mask=bias)
    torch.testing.assert_close(output, head_by_head(layer, *inputs, bias), rtol=0, atol=1e-10)


def test_dropout_acts_in_training_only_and_on_both_paths() -> None:
    layer = MultiHeadAttention(D, H, dropout=0.5)
    x = torch.randn(B, T, D)
    for need_weights in (False, True):
        outs = [layer.train()(x, x, x, need_weights=need_weights)[0] for _ in range(2)]
        assert not torch.equal(*outs)
        outs = [layer.eval()(x, x, x, need_weights=need_weights)[0] for _ in range(2)]
        torch.testing.assert_close(*outs)


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
    causal, padding = causal_bias(T, T, torch.float64, torch.device("cpu")), padding_mask([5, 2, 3], T)
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
    padding = torch.where(padding_mask([7, 1, 4], U), -torch.inf, 0.0).double()
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


@pytest.mark.parametrize("mask", ["key_padding_mask", "attn_mask"])
def test_a_mask_of_whole_numbers_is_refused_as_by_torch(mask: str) -> None:
    x = torch.randn(1, 3, 8)
    given = {mask: torch.tensor([[0, 0, 1]] if mask == "key_padding_mask" else [[0, 0, 1]] * 3)}
    with pytest.raises(ValueError, match=f"{mask} of torch.int64: must be torch.bool"):
        MultiHeadAttention(8, 2)(x, x, x, **given)
    with pytest.raises(AssertionError):
        nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, **given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (5, 8)}, r"query of shape \(5, 8\): must be \(batch, queries, width\)"),
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
def test_shapes_that_do_not_fit_are_refused(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"query": (1, 5, 8), "key": (1, 3, 8), "value": (1, 3, 8)} | change
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(8, 2)(**{name: torch.zeros(s) for name, s in shapes.items()})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("dropout", -1), ("dropout", 1), ("dropout", float("nan")), ("head_dim", 0), ("num_heads", -1), ("kdim", 0)],
)
def test_sizes_and_dropout_that_cannot_be_are_refused(setting: str, value: float) -> None:
    settings: Any = {"num_heads": 4, "head_dim": 16, setting: value}
    with pytest.raises(ValueError, match=f"{setting}={value}: must be "):
        MultiHeadAttention(64, **settings)
    with pytest.raises(ValueError, match="num_heads=5: must divide embed_dim=12, so one of 1, 2, 3, 4, 6, 12"):
        MultiHeadAttention(12, 5)


def test_an_untrained_gate_changes_nothing_and_that_of_the_exercise_sums_to_one() -> None:
    assert Softmax(scale="heads", init="zeros")(4)().tolist() == [1.0] * 4
    torch.manual_seed(3)
    gate = Softmax(scale="one", init="rand")(4)
    torch.manual_seed(3)
    assert torch.equal(gate(), torch.rand(4).softmax(0))


def test_entropy_pressure_pulls_heads_apart() -> None:
    gate = Softmax(entropy_weight=0.5)(4)
    penalty = gate.penalty()
    assert penalty is not None
    assert penalty.item() == pytest.approx(0.5 * math.log(4))
    with torch.no_grad():
        gate.logits.copy_(torch.tensor([50.0, 0, 0, 0]))
    peaked = gate.penalty()
    assert peaked is not None
    assert peaked.item() == pytest.approx(0.0, abs=1e-6)
    assert Softmax()(4).penalty() is None


def test_where_gates_start_leaves_the_weights_alone(task: Sort) -> None:
    """Models of one seed differ in their gates and in nothing else."""
    states = []
    for init in ("zeros", "rand"):
        torch.manual_seed(3)
        model = Seq2Seq(Transformer(d_model=8, num_heads=2), len(task.vocabulary), Softmax(init=init))  # type: ignore[arg-type]
        states.append(model.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]) != name.endswith("gate.logits"), name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kept", [[0, 1, 3], [0, 3], [1], []])
def test_removed_equals_masked(kept: list[int], bias: bool) -> None:
    layer = MultiHeadAttention(8, 4, kdim=5, vdim=6, bias=bias, gate=Softmax()).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.head_mask[3] = 0.5
    q, k, v = (torch.randn(2, 3, size, dtype=torch.float64) for size in (8, 5, 6))
    gates = torch.zeros(4).index_fill(0, torch.tensor(kept, dtype=torch.long), 1.0)
    masked, _ = layer(q, k, v, gates=gates)
    small = copy.deepcopy(layer)
    small.keep_heads([0, 1, 3])  # in two steps, the second of which counts from what is left
    small.keep_heads([place for place, n in enumerate((0, 1, 3)) if n in kept])
    torch.testing.assert_close(small(q, k, v)[0], masked)
    explicit, weights = small(q, k, v, need_weights=True)
    torch.testing.assert_close(explicit, masked)
    torch.testing.assert_close(weights, layer(q, k, v, need_weights=True)[1][:, kept])
    assert small.num_heads == len(kept)
    assert small.gate is None
    assert small.q_proj.weight.shape == (2 * len(kept), 8)
    assert small.out_proj.weight.shape == (8, 2 * len(kept))
