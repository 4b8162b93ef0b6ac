"""Proofs of `wrap`, its answers for models that it cannot prove, and what a gate does."""

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.api.wrap import Heads, wrap
from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.heads import HeadId
from mhaprune.surgery import copying
from support import attention, own_layers
from support.classifier import Classifier, batches
from support.sizes import slow

X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))


def wrapped(model: nn.Module, **given: Any) -> Heads:
    return wrap(model, losses.classification, score=batches(2), choose=batches(1, 1), report=batches(1, 2), **given)


class WithDecoy(Classifier):
    """A classifier with one attention more, of which the answer is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.decoy = MultiHeadAttention(16, 4)

    def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
        self.decoy(*3 * [self.embedding(ids)])
        return logits


def test_attention_whose_answer_is_thrown_away_is_named_and_a_report_needs_no_effect_of_it() -> None:
    heads = wrapped(WithDecoy())
    assert heads.proven.without_effect == tuple(HeadId("decoy", 0, n) for n in range(4))
    assert "12 heads in 3 blocks, 4 without effect (decoy.0.0, decoy.0.1, decoy.0.2, decoy.0.3)" in repr(heads)
    assert set(heads.subject.unread()) == {("decoy", 0)}
    found = heads.report(by=["ablation"], budgets=[4, 6], rounds=2, refit=False)
    assert found.checks["smallest_gate_effect"] > 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_a_head_whose_output_is_multiplied_by_zeros_is_named(seed: int) -> None:
    torch.manual_seed(seed)
    model = Classifier()
    with torch.no_grad():
        model.attention[1].out_proj.weight[:, 4:8] = 0
    heads = wrapped(model)
    assert heads.proven.without_effect == (HeadId("attention", 1, 1),)
    assert heads.proven.smallest_effect > 1e-6


def test_a_model_in_which_no_gate_has_an_effect_is_refused() -> None:
    """As a classifier is whose last layer starts at zero."""
    model = Classifier()
    nn.init.zeros_(model.output.weight)
    with pytest.raises(ValueError, match="closing a head changes no output.* only zeros") as refused:
        wrapped(model)
    assert "\n" not in str(refused.value)


class Summed(nn.Module):
    """Attention that a trace does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)) for part in self.qkv(x_BTD).chunk(3, dim=-1))
        weights = (q[:, :, None] * k[:, None]).sum(-1).softmax(dim=2)
        return self.out((weights[..., None] * v[:, None]).sum(2).flatten(2))


@pytest.mark.parametrize(("name", "kind"), [("attn", "Summed"), ("mix", "SummedAttention")])
def test_attention_that_was_not_seen_is_named(name: str, kind: str) -> None:
    """By the name of the module, or by that of its class."""

    class Partly(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleDict({name: type(kind, (Summed,), {})()})])

        def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
            return logits + self.layers[0][name](self.embedding(ids)).mean(dim=1)[:, :3]

    heads = wrapped(Partly())
    assert repr(heads) == f"8 heads in 2 blocks, all with an effect, all removable; not seen: layers.0.{name}"


def test_a_model_that_has_no_float64_is_proved_block_by_block_or_refused_in_one_line() -> None:
    class Single(Classifier):
        def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
            if logits.dtype == torch.double:
                raise RuntimeError("Expected Float32, got Double\nand more")
            return logits

    assert repr(wrapped(Single())) == "8 heads in 2 blocks, all with an effect, all removable"
    with pytest.raises(ValueError, match=r"does not compute in it \(Expected Float32, got Double\)$"):
        wrapped(Single(), prove="whole")


def test_only_attention_is_copied_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    doubled: list[Tensor] = []
    plain = copying.as_double
    monkeypatch.setattr(copying, "as_double", lambda tensor: doubled.append(tensor) or plain(tensor))
    model = Classifier()
    attention = {id(weight) for weight in (*model.attention.parameters(), *model.attention.buffers())}
    heads = wrapped(model)
    sizes = {weight.shape for weight in model.parameters() if id(weight) not in attention}
    assert doubled
    assert not {tensor.shape for tensor in doubled} & {model.embedding.weight.shape, model.output.weight.shape}
    left = heads.subject.without(heads.mask(0.5), shared=True)
    assert left.model.embedding.weight is model.embedding.weight
    assert heads.without(heads.mask(0.5)).model.embedding.weight is not model.embedding.weight
    doubled.clear()
    wrapped(model, prove="whole")
    assert {tensor.shape for tensor in doubled} >= sizes


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
def test_every_kind_of_proof_finds_the_same(dtype: torch.dtype) -> None:
    """In float64, also for a model that computes in less."""
    torch.manual_seed(0)
    model = Classifier().to(dtype)
    by_block, whole, none = (wrapped(model, prove=kind) for kind in ("blocks", "whole", "none"))
    for heads in (by_block, whole):
        assert repr(heads) == "8 heads in 2 blocks, all with an effect, all removable"
        assert heads.proven.difference < 1e-12
    assert by_block.proven.smallest_effect == pytest.approx(whole.proven.smallest_effect, rel=0.5)
    assert repr(none) == "8 heads in 2 blocks, not proved"
    mask = by_block.mask(keep=3, by="magnitude")
    assert [len(heads.without(mask).grid) for heads in (by_block, whole, none)] == [3, 3, 3]


def test_a_weight_that_is_also_read_elsewhere_shows_in_the_whole_model() -> None:
    """Each attention module alone is right."""

    class ReadsKeys(Classifier):
        def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
            return logits + self.attention[0].k_proj(self.embedding(ids)).sum(dim=(1, 2))[:, None]

    heads = wrapped(ReadsKeys())
    assert heads.proven.why_not.startswith("masked and removed differ by")


def test_layers_of_one_class_need_one_pass_without_heads_and_others_one_each() -> None:
    """In it, the last layer has lost all heads, and the others of its class some."""
    without: list[list[int]] = []

    class Seen(Classifier):
        def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
            sizes = [each.num_heads for each in self.attention]
            without.extend([sizes] * (sizes != [4, 4]))
            return logits

    assert wrapped(Seen()).proven.difference < 1e-12
    assert without == [[3, 0]]
    without.clear()
    model = Seen()
    model.attention[1] = AnotherClass(16, 4)
    assert wrapped(model).proven.difference < 1e-12
    assert without == [[3, 2], [4, 0]]


class AnotherClass(MultiHeadAttention):
    pass


def test_a_smaller_model_that_ends_in_nan_is_not_proved() -> None:
    """Although each of its modules computes what it should."""

    class Shaped(Classifier):
        def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
            return logits * (1.0 if self.attention[0].out_proj.in_features == 16 else float("nan"))

    assert "none removable: masked and removed differ by nan" in repr(wrapped(Shaped()))


class OtherKernel(Classifier):
    """Without heads it rounds in another way in half precision, as a kernel for other sizes does. It answers in single
    precision."""

    def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
        return logits.float() * (1 + 2**-9 * (self.attention[0].out_proj.in_features != 16))


def in_half(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(**batch)


def test_rounding_in_half_precision_is_no_difference_also_of_outputs_in_single() -> None:
    assert wrapped(OtherKernel()).proven.why_not.startswith("masked and removed differ by 0.00")
    for heads in (wrapped(OtherKernel().bfloat16()), wrapped(OtherKernel(), call=in_half)):
        assert not heads.proven.why_not
        assert heads.prune(keep=0.5, by="magnitude")


class NearlyRight(MultiHeadAttention):
    """Attention that depends on how many heads it has, by less than float32 shows in an output."""

    def forward(self, *given: Any, **named: Any) -> Any:
        out, weights = super().forward(*given, **named)
        return out + 1e-7 * self.num_heads, weights


def test_a_fault_that_rounding_could_hide_shows_in_the_module_alone() -> None:
    model = Classifier()
    model.attention = nn.ModuleList(NearlyRight(16, 4) for _ in range(2))
    assert wrapped(model).proven.why_not.endswith("e-07, allowed is 1e-09")


class Large(MultiHeadAttention):
    """Attention with outputs of 1e6 and more, which depend a little on how many heads it has."""

    fault = 0.0

    def forward(self, *given: Any, **named: Any) -> Any:
        out, weights = super().forward(*given, **named)
        return 1e7 * out * (1 + self.fault * self.num_heads), weights


@pytest.mark.parametrize("prove", ["blocks", "whole"])
@pytest.mark.parametrize(("fault", "message"), [(1e-14, ""), (1e-7, "masked and removed differ by .*e-07, allowed")])
def test_a_difference_is_one_of_the_size_of_the_outputs(prove: str, fault: float, message: str) -> None:
    model = Classifier()
    model.attention = nn.ModuleList(Large(16, 4) for _ in range(2))
    for layer in model.attention:
        layer.fault = fault
    assert re.match(message or "$", wrapped(model, prove=prove).proven.why_not)


class Coarse(Classifier):
    def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
        return logits + (logits - logits.detach()) * -1  # which has no derivative


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_effect_that_a_coarse_number_cannot_hold_is_seen_all_the_same(dtype: torch.dtype) -> None:
    """Its derivative is rounded to zero; closing the head is not."""
    assert wrapped(Coarse().to(dtype)).proven.without_effect == ()


class LooksAround(nn.Module):
    """Attention in windows, by hand; the width of a window is that of all heads together."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(16, 16) for _ in range(4))
        self.my_heads, self.window_size, self.pruned_heads = 4, 16, set[int]()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            made(x).view(*x.shape[:2], self.my_heads, 4).transpose(1, 2)
            for made in (self.q_proj, self.k_proj, self.v_proj)
        )
        far = (torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]).abs() < self.window_size
        return self.out_proj(
            nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=far).transpose(1, 2).flatten(2)
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            lambda said: SimpleNamespace(logits=said),
            "returns a SimpleNamespace with no real numbers to",
        ),
        (lambda said: {"logits": said[:, :0]}, "returns a dict with no real numbers to compare"),
        (lambda said: {"logits": said, "more": said / 0}, "an output is not finite"),
    ],
)
def test_outputs_that_cannot_be_compared_are_refused(changed: Any, message: str) -> None:
    model = own_layers.made(own_layers.Layer)
    with pytest.raises(ValueError, match=f"model: {message}"):
        wrap(
            model,
            lambda output, batch: batch["labels"].float(),
            score=own_layers.batches(),
            call=lambda model, batch: changed(own_layers.call(model, batch)),
        )


def test_a_size_that_is_no_width_of_heads_stays() -> None:
    heads = attention.wrapped(LooksAround, LooksAround, x=X)
    assert repr(heads) == "8 heads in 2 blocks, all with an effect, all removable"
    small = attention.pruned(heads, {0: [0], 1: [1, 2]}, X)
    assert [(layer.my_heads, layer.window_size) for layer in small.layers] == [(3, 16), (2, 16)]


def test_what_was_not_proved_is_cut_like_what_was() -> None:
    """The sizes in the code of a layer are looked for at its first removal."""

    class Fixed(LooksAround):
        def forward(self, x: Tensor) -> Tensor:
            self.my_heads = 4
            return super().forward(x)

    heads = attention.wrapped(Fixed, x=X, prove="none")
    assert repr(heads) == "4 heads in 1 block, not proved"
    attention.pruned(heads, {0: [0]}, X)


class Random(Classifier):
    size = 3.0

    def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
        return logits + self.size * torch.rand(())


def test_random_numbers_in_evaluation_are_said_and_can_be_fixed() -> None:
    for size in (3.0, 1e-3):
        model = Random()
        model.size = size
        with pytest.raises(
            ValueError, match="^model: two passes .* differ by .* draws random numbers, or writes to its"
        ):
            wrapped(model)

    def call(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        torch.manual_seed(0)
        return model(**batch)

    assert repr(wrapped(Random(), call=call)) == "8 heads in 2 blocks, all with an effect, all removable"


@pytest.mark.parametrize("layer", [0, 1])
def test_a_model_that_counts_its_heads_is_gated_and_not_pruned(layer: int) -> None:
    """What it computes depends on how many heads there are, so a removed head is not a masked one."""

    class Counts(Classifier):
        def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
            return logits / max(1, self.attention[layer].num_heads)

    heads = wrap(Counts(), losses.classification, score=batches(1))
    assert heads.proven.difference > 1e-3
    assert heads.proven.why_not.startswith("masked and removed differ by 0.")
    assert len(heads.score("ablation")) == len(heads.grid)
    assert len(heads.mask(keep=6, by="greedy").removed) == 2, "masks are enough for that"
    for removing in (lambda: heads.mask(keep=6, by="greedy_refit"), lambda: heads.prune(0.5)):
        with pytest.raises(ValueError, match="of this model can be gated, not removed: masked and removed differ"):
            removing()


class AndInput(nn.Module):
    """Attention whose output projection reads its heads and, behind them, its input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (made(x).unflatten(-1, (-1, 4)).transpose(1, 2) for made in (self.query, self.key, self.value))
        context = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(torch.cat([context, x], dim=-1))


def test_columns_that_read_no_head_stay_behind_the_heads() -> None:
    heads = attention.wrapped(AndInput, x=X)
    assert repr(heads) == "4 heads in 1 block, all with an effect, all removable"
    assert heads.proven.difference < 1e-12
    assert heads.prune(keep=1).layers[0].out.weight.shape == (16, 4 + 16)


@pytest.fixture(scope="module")
def heads() -> Heads:
    return wrap(Classifier().double(), losses.classification, score=batches(1))


def test_a_closed_gate_lets_its_fallback_through_instead_of_nothing(heads: Heads) -> None:
    """Half of a head and half of what it says itself is the head; of twice that, it is one and a half of it."""
    subject, split = heads.subject, heads.splits["score"]
    own, n = subject.head_outputs(split), len(subject.grid)
    half, closed = torch.full((n,), 0.5).double(), torch.zeros(n).double()

    def losses_of(gates_N: torch.Tensor, times: float | None = None) -> torch.Tensor:
        fallback = None if times is None else {block: times * context for block, context in own.items()}
        with torch.no_grad():
            return subject.evaluate(split, gates_N, fallback).loss

    first = {head for head in subject.grid if head.block == subject.grid.blocks[0]}
    of_first = torch.tensor([head in first for head in subject.grid])
    open_E = subject.evaluate(split).loss.detach()
    torch.testing.assert_close(losses_of(half, 1.0), open_E)
    torch.testing.assert_close(losses_of(closed, 1.0), open_E)
    assert (losses_of(closed) - open_E).abs().max() > 1e-3
    # The second block reads what the first one wrote, so only one of them can be asked for another scale.
    expected = losses_of(torch.where(of_first, 1.5, 1.0).double())
    gates = torch.where(of_first, 0.5, 1.0).double()
    torch.testing.assert_close(losses_of(gates, 2.0), expected)


class Windows(Classifier):
    """Attention within windows of two tokens, each of which is a row of its own."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.attention:
            rows = x.reshape(-1, 2, x.shape[-1])
            x = x + layer(rows, rows, rows)[0].reshape(x.shape)
        return {"logits": self.output(x.mean(dim=1))}


def test_gates_of_an_example_reach_all_of_its_windows() -> None:
    """Each example has gates of its own, and loses what it loses alone."""
    torch.manual_seed(0)
    heads = wrap(Windows().double(), losses.classification, score=batches(1))
    subject, split = heads.subject, heads.splits["score"]
    gates_BN = torch.rand(len(split), len(subject.grid)).double()
    together = subject.evaluate(split, gates_BN).loss
    alone = torch.cat([subject.evaluate(split[e : e + 1], gates_BN[e]).loss for e in range(len(split))])
    torch.testing.assert_close(together, alone)
