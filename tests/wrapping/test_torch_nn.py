"""Attention of torch.nn and of a user's own modules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhaprune.api.wrap import wrap
from mhaprune.heads import HeadMask
from mhaprune.hooks.blocks import AttentionBlock, Rows
from mhaprune.measure.outcomes import output_difference
from mhaprune.surgery.torch_attention import converted
from support import own_layers
from support.attention import Attention, Stack, pruned, square

B, T, U, D, H = 3, 5, 4, 16, 4


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Biases start at zero, and what is zero proves nothing."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.eval()


class OneCall(nn.Module):
    """A call of attention with masks, batch first outside whatever it is inside."""

    def __init__(self, attention: nn.Module, batch_first: bool) -> None:
        super().__init__()
        self.attention, self.batch_first = attention, batch_first

    def forward(self, query: Tensor, memory: Tensor, **masks: Any) -> Any:
        given = (query, memory, memory) if self.batch_first else (x.transpose(0, 1) for x in (query, memory, memory))
        out, weights = self.attention(*given, **masks)
        return (out if self.batch_first else out.transpose(0, 1)), weights


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": torch.arange(U) >= torch.tensor([[4], [2], [3]])},
    "float padding": {"key_padding_mask": torch.zeros(B, U).masked_fill(torch.arange(U) > 2, -torch.inf)},
    "boolean": {"attn_mask": torch.ones(T, U).triu(1).bool()},
    "float": {"attn_mask": torch.randn(T, U, generator=torch.Generator().manual_seed(0))},
    "per head": {"attn_mask": torch.randn(B * H, T, U, generator=torch.Generator().manual_seed(0))},
    "unaveraged": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("batch_first", "sizes", "bias"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_a_converted_layer_computes_what_torch_does(kind: str, batch_first: bool, sizes: bool, bias: bool) -> None:
    widths = {"kdim": 6, "vdim": 6} if sizes else {}
    attention = nn.MultiheadAttention(D, H, bias=bias, batch_first=batch_first, **widths)
    model = randomised(OneCall(attention, batch_first))
    query, memory = torch.randn(B, T, D), torch.randn(B, U, 6 if sizes else D)
    expected, weights = model(query, memory, **MASKS[kind])
    out, ours = converted(model)(query, memory, **MASKS[kind])
    torch.testing.assert_close(out, expected)
    assert (ours is None) == (weights is None)
    if weights is not None:
        torch.testing.assert_close(ours, weights)


@pytest.mark.parametrize("kind", MASKS)
def test_heads_of_a_layer_are_removed_under_every_mask(kind: str) -> None:
    model = randomised(OneCall(nn.MultiheadAttention(D, H, batch_first=True), True))
    batch = {"query": torch.randn(B, T, D), "memory": torch.randn(B, U, D)}
    heads = wrap(model, square, score=[batch])
    batch = {name: value.double() for name, value in batch.items()}
    masks = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in MASKS[kind].items()}
    precise = heads.subject.in_double().changed(run=lambda model, _: model(**batch, **masks)[0])
    for gone in (heads.grid.heads[:0], heads.grid.heads[1:3], heads.grid.heads):
        mask = HeadMask(heads.grid).without(*gone)
        assert output_difference(precise, precise.without(mask), heads.splits["score"], mask.gates()) < 1e-9


class Encoder(nn.Module):
    """Layers of torch.nn under a padding mask and a causal one."""

    def __init__(self, norm_first: bool, batch_first: bool, causal: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, H, 24, dropout=0.1, batch_first=batch_first, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.batch_first, self.causal = batch_first, causal

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
        x = x if self.batch_first else x.transpose(0, 1)
        padding = torch.zeros_like(attention_mask, dtype=x.dtype).masked_fill(attention_mask == 0, -torch.inf)
        out: Tensor = self.layers(x, mask=mask, src_key_padding_mask=padding, is_causal=self.causal)
        return out if self.batch_first else out.transpose(0, 1)


class Seq2seq(nn.Module):
    def __init__(self, norm_first: bool, batch_first: bool, causal: bool) -> None:
        super().__init__()
        self.body = nn.Transformer(D, H, 1, 2, 24, batch_first=batch_first, norm_first=norm_first)
        self.batch_first, self.causal = batch_first, causal

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        given = (x, x.flip(1)) if self.batch_first else (x.transpose(0, 1), x.flip(1).transpose(0, 1))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
        out: Tensor = self.body(*given, tgt_mask=mask, memory_key_padding_mask=attention_mask == 0)
        return out if self.batch_first else out.transpose(0, 1)


@pytest.mark.filterwarnings("ignore:.*nested tensor.*", "ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("kind", [Encoder, Seq2seq])
@pytest.mark.parametrize(
    ("norm_first", "batch_first", "causal"), [(True, True, True), (False, False, True), (False, True, False)]
)
def test_transformers_of_torch_lose_heads_exactly(kind: Any, norm_first: bool, batch_first: bool, causal: bool) -> None:
    model = randomised(kind(norm_first, batch_first, causal))
    mask = torch.ones(B, T, dtype=torch.long)
    mask[0, 3:] = 0
    heads = wrap(model, square, score=[{"x": torch.randn(B, T, D), "attention_mask": mask}])
    assert heads.proven.why_not == ""
    assert heads.proven.smallest_effect > 1e-6
    batch, precise = heads.splits["score"], heads.subject.in_double()
    torch.testing.assert_close(heads.subject.predict(batch), model(**batch.arguments()), atol=1e-5, rtol=1e-5)
    grid = heads.grid
    for gone in (grid.heads[1:2], [grid.heads[0], *grid.heads[5:7]], grid.heads[:4], grid.heads):
        closed = HeadMask(grid).without(*gone)
        assert output_difference(precise, precise.without(closed), batch, closed.gates()) < 1e-9


def test_attention_of_torch_in_half_precision_is_the_same_model() -> None:
    model = randomised(Encoder(False, True, False)).bfloat16()
    x = {"x": torch.randn(B, T, D).bfloat16(), "attention_mask": torch.ones(B, T, dtype=torch.long)}
    assert wrap(model, lambda out, batch: out[:, 0].float().square().amax(dim=1), score=[x]).proven.why_not == ""


def test_what_torch_adds_to_the_keys_is_refused() -> None:
    model = OneCall(nn.MultiheadAttention(D, H, add_bias_kv=True, batch_first=True), True)
    with pytest.raises(ValueError, match="add_bias_kv or add_zero_attn"):
        wrap(model, square, score=[{"query": torch.randn(B, T, D), "memory": torch.randn(B, U, D)}])


class Doubled(nn.MultiheadAttention):
    """A subclass with a `forward` of its own."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return 2 * super().forward(x, x, x)[0]


class PassedOn(nn.MultiheadAttention):
    def forward(self, *given: Any, **named: Any) -> Any:
        return super().forward(*given, **named)


def test_a_subclass_with_a_forward_of_its_own_stays_what_it_is(tmp_path: Path) -> None:
    *_, small = own_layers.check(lambda: Doubled(D, H, batch_first=True), tmp_path / "saved", out="out_proj")
    assert isinstance(small.layers[0], Doubled)


class Louder(nn.MultiheadAttention):
    def forward(self, *given: Any, **named: Any) -> Any:
        said, weights = super().forward(*given, **named)
        return 2 * said, weights


def fused(kind: type[nn.MultiheadAttention]) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 8, dropout=0.0, batch_first=True)
    layer.self_attn = kind(D, H, batch_first=True)
    return layer


def test_what_the_fused_kernel_of_torch_passes_by_is_refused() -> None:
    """It runs without gradients only, so that a training would begin with another function."""
    with pytest.raises(ValueError, match="if its subclass of nn.MultiheadAttention is computed as that class itself"):
        own_layers.wrapped(own_layers.made(lambda: fused(Louder)))


def test_attention_alone_is_gated() -> None:
    batch = {name: torch.randn(B, T, D) for name in ("query", "key", "value")}
    assert "4 heads in 1 block" in repr(wrap(nn.MultiheadAttention(D, H, batch_first=True), square, score=[batch]))


def test_a_subclass_in_a_layer_with_a_fused_kernel_is_gated_there_too() -> None:
    model = own_layers.made(lambda: fused(PassedOn)).double()
    shut = own_layers.closed(model, [f"layers.{n}.self_attn.out_proj" for n in range(2)])
    assert own_layers.apart(own_layers.wrapped(model).prune(mask=own_layers.GONE), shut) < 1e-9


class ByHand(Attention):
    """Attention that nothing can trace."""

    def __init__(self) -> None:
        super().__init__(D)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = ((q[:, :, :, None] * k[:, :, None]).sum(-1) / q.shape[-1] ** 0.5).softmax(-1)
        return (weights[..., None] * v[:, :, None]).sum(-2)


class Products(ByHand):
    """The same with two products of matrices."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(q, k.permute(0, 1, 3, 2)).div(2).softmax(-1) @ v


class Unnormalised(ByHand):
    """Two products with numbers between them that are weights of nothing."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul(q, k.mT).tanh() @ v


class Tower(nn.Module):
    def __init__(self, kind: type[Attention] = ByHand) -> None:
        super().__init__()
        self.my_attention = kind()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.my_attention(x)


def test_attention_written_out_is_found() -> None:
    model = randomised(Tower(Products))
    heads = wrap(model, square, score=[torch.randn(B, T, D)])
    assert repr(heads) == "4 heads in 1 block, all with an effect, all removable"
    assert heads.prune(3).my_attention.num_heads == 3
    (seen,) = heads.subject.attention_maps(heads.splits["score"]).values()
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(B, H, T))


def test_products_without_weights_are_no_attention() -> None:
    with pytest.raises(ValueError, match="no attention found"):
        wrap(randomised(Tower(Unnormalised)), square, score=[torch.randn(B, T, D)])


def test_blocks_by_hand() -> None:
    model, batch = randomised(Tower()), [torch.randn(B, T, D)]
    message = 'AttentionBlock.path, out="o", heads=4, query="q", key="k", value="v". for path in ."my_attention".'
    with pytest.raises(ValueError, match=f"Tower: no attention found.*Name the blocks by hand, for example.*{message}"):
        wrap(model, square, score=batch)
    gates_only = wrap(model, square, score=batch, blocks=[AttentionBlock("my_attention", out="o", heads=4)])
    assert repr(gates_only).endswith("none removable: my_attention: it is given without query, key, value")
    assert gates_only.proven.smallest_effect > 1e-6
    block = AttentionBlock("my_attention", out="o", heads=4, query="q", key="k", value="v")
    heads = wrap(model, square, score=batch, blocks=[block])
    assert heads.proven.why_not == ""
    assert heads.prune(1).my_attention.q.out_features == D // 4


class Fused(nn.Module):
    """Attention without products of matrices, whose queries, keys and values come from one module, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = H, nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.gru_rel_pos_linear = nn.Linear(D, D)  # as WavLM has one, after W_O

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, dim=-1))
        weights = (q[:, :, None] * k[:, None]).sum(-1).softmax(dim=2)
        return self.out((weights[..., None] * v[:, None]).sum(2).flatten(2)) + self.gru_rel_pos_linear(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))


class FusedAttention(Fused):
    pass


def test_the_hint_names_w_o_of_every_layer_and_what_it_says_can_be_pasted() -> None:
    model = randomised(Stack(FusedAttention, mlp, FusedAttention))
    data = [torch.randn(B, T, D)]
    with pytest.raises(ValueError, match="no attention found") as refused:
        wrap(model, square, score=data)
    hint = str(refused.value).partition("blocks=")[2]
    assert hint.startswith('[AttentionBlock(path, out="out", heads=4, query=Rows.part(f"{path}.qkv", 0, 3, 4, 4), key=')
    assert hint.endswith(' for path in ["layers.0", "layers.2"]]')
    heads = wrap(model, square, score=data, blocks=eval(hint))
    assert repr(heads) == "8 heads in 2 blocks, all with an effect, all removable"


def test_a_number_of_heads_that_the_attention_weights_contradict_is_refused() -> None:
    model, data = randomised(Tower(Products)), [torch.randn(B, T, D)]
    block = AttentionBlock("my_attention", out="o", heads=8)
    with pytest.raises(ValueError, match=r"^blocks: my_attention with heads=8: its attention weights are of 4 heads$"):
        wrap(model, square, score=data, blocks=[block])
    assert len(wrap(model, square, score=data, blocks=[replace(block, heads=4)]).grid) == 4


def test_rows_of_one_module_are_named_by_hand_and_cut() -> None:
    model, data = randomised(Stack(Fused, mlp, Fused)), [torch.randn(B, T, D)]
    parts = {
        name: Rows.part("qkv", n, of=3, heads=H, head_dim=D // H) for n, name in enumerate(("query", "key", "value"))
    }
    blocks = [AttentionBlock(f"layers.{n}", "out", H, counts=["heads"], **parts) for n in (0, 2)]
    heads = wrap(model, square, score=data, blocks=blocks)
    assert repr(heads) == "8 heads in 2 blocks, all with an effect, all removable"
    small = pruned(heads, {0: [0], 2: [1, 2]}, data[0])
    assert [small.layers[n].qkv.out_features for n in (0, 2)] == [3 * 3 * D // 4, 3 * 2 * D // 4]


def test_rows_of_other_heads_are_seen_in_the_last_layer_too() -> None:
    """A mask that removes all heads of a layer does not show which weights are whose."""
    model, data = randomised(Stack(Fused, mlp, Fused)), [torch.randn(B, T, D)]
    query, key, value = (Rows.part("qkv", n, of=3, heads=H, head_dim=D // H) for n in range(3))
    right: Any = {"query": query, "key": key, "value": value, "counts": ["heads"]}
    turned = right | {"value": replace(value, heads=(*value.heads[1:], value.heads[0]))}
    blocks = [AttentionBlock(f"layers.{n}", "out", H, **parts) for n, parts in ((0, right), (2, turned))]
    heads = wrap(model, square, score=data, blocks=blocks)
    assert "removed differ" in heads.proven.why_not


def test_attention_that_looks_only_ahead_is_attention() -> None:
    class Ahead(ByHand):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = torch.ones(q.shape[2], q.shape[2]).triu().log()
            weights = ((q[:, :, :, None] * k[:, :, None]).sum(-1) + seen).softmax(-1)
            return (weights[..., None] * v[:, :, None]).sum(-2)

    block = AttentionBlock("my_attention", out="o", heads=4, query="q", key="k", value="v")
    heads = wrap(randomised(Tower(Ahead)), square, score=[torch.randn(B, T, D)], blocks=[block])
    assert heads.proven.why_not == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_attention_adapted_by_lora_and_compiled_models_are_told_what_to_do() -> None:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.lora_B = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.lora_B(x)

    class Adapted(Attention):
        def __init__(self) -> None:
            super().__init__(D)
            self.q = Lora()  # type: ignore[assignment]

    heads = wrap(randomised(Tower(Adapted)), square, score=[torch.randn(B, T, D)])
    assert "its query is adapted by LoRA; call merge_and_unload() on the model first" in heads.proven.why_not
    with pytest.raises(
        ValueError, match="model: is what torch.compile returned; wrap the model inside, model._orig_mod"
    ):
        wrap(torch.compile(Tower()), square, score=[torch.randn(B, T, D)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (AttentionBlock("my_attention", "q", 4), "my_attention.q is no output projection of attention"),
        (
            AttentionBlock("my_attention", "o", 4, query=Rows("q", ((0, 99),) * 4)),
            "q makes 16 features, of which query must take 4 for each of 4 heads",
        ),
        (AttentionBlock("my_attention", "nothing", 4), "the model has no module my_attention.nothing"),
        (AttentionBlock("my_attention", "o", 3), "my_attention with heads=3: must divide the 16 input columns"),
        (AttentionBlock("", "my_attention", 4), "is a ByHand, must be a linear module"),
    ],
)
def test_blocks_by_hand_that_do_not_fit_are_refused(block: AttentionBlock, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(randomised(Tower()), square, score=[torch.randn(B, T, D)], blocks=[block])
