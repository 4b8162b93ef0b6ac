"""Heads are found whole, block by block, and attention in which none is found is named."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mhaprune import AttentionBlock, Rows
from mhaprune.hooks.attention_calls import weights_of
from mhaprune.hooks.blocks import name_blocks
from support.attention import HEAD_DIM, HEADS, WIDTH, Attention, Stack, X, close_by_hooks, pruned, wrapped

D, H, K = WIDTH, HEADS, HEAD_DIM


class Relu(Attention):
    def after(self, context: Tensor) -> Tensor:
        return F.relu(context)


class Hardswish(Attention):
    def after(self, context: Tensor) -> Tensor:
        return F.hardswish(4 * context)


class Features(Attention):
    def made(self, x: Tensor) -> Tensor:
        return F.relu(x)


@pytest.mark.parametrize("kind", [Relu, Hardswish, Features])
def test_a_head_is_whole_also_where_an_activation_is_flat_on_the_first_example(kind: Any) -> None:
    """A closed head and a removed head change all that the head adds, also on examples that were never seen."""
    heads = wrapped(kind, x=X[:2])
    (block,) = heads.subject.blocks
    assert block.columns == tuple(tuple(range(h * K, (h + 1) * K)) for h in range(H))
    new = torch.randn(9, 7, D, generator=torch.Generator().manual_seed(5))
    small, model = pruned(heads, {0: [2]}, new), heads.subject.model
    close_by_hooks([model.layers[0].o], K, {0: [2]})
    with torch.no_grad():
        torch.testing.assert_close(small(new), model(new))


class Stored(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.attention = (q @ k.mT).softmax(-1)
        self.seen = [*getattr(self, "seen", [])[-1:], self.attention]
        return self.attention @ v


def test_a_model_that_keeps_its_attention_weights_is_cut_and_left_as_it_was() -> None:
    heads = wrapped(Stored, Stored)
    model: Any = heads.subject.model
    copy.deepcopy(model)
    pruned(heads, {0: [1]})
    heads.score("taylor")
    copy.deepcopy(model)  # also after passes with gradients
    model(X).sum().backward()  # the user's own call leaves a result of its graph in the model
    assert len(wrapped(model).prune(mask={0: [1]}).layers) == 2


class Products(nn.Module):
    """The inner module of the attention in Dive into Deep Learning."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.attention_weights = (torch.bmm(q, k.mT) / q.shape[-1] ** 0.5).softmax(-1)
        return torch.bmm(self.attention_weights, v)


class Outer(nn.Module):
    """It folds its heads into the batch by a number that the inner module does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.attention = H, Products()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(D, D) for _ in range(4))

    def folded(self, x: Tensor) -> Tensor:
        x = x.reshape(*x.shape[:2], self.num_heads, -1).permute(0, 2, 1, 3)
        return x.reshape(-1, *x.shape[2:])

    def forward(self, x: Tensor) -> Tensor:
        context = self.attention(*(self.folded(each(x)) for each in (self.W_q, self.W_k, self.W_v)))
        context = context.reshape(-1, self.num_heads, *context.shape[1:]).permute(0, 2, 1, 3)
        out: Tensor = self.W_o(context.reshape(*context.shape[:2], -1))
        return out


def test_the_number_of_heads_may_be_that_of_the_module_around() -> None:
    heads = wrapped(Outer, Outer)
    assert repr(heads) == "8 heads in 2 blocks, all with an effect, all removable"
    assert [layer.num_heads for layer in pruned(heads, {0: [1], 1: [0, 3]}).layers] == [3, 2]


@pytest.mark.parametrize("gone", [[0, 2, 3], [0, 1, 2, 3]])
def test_a_last_head_and_a_layer_without_heads_are_found_where_heads_are_folded_into_the_batch(gone: list[int]) -> None:
    small = wrapped(Outer, Outer).prune(mask={0: gone})
    again = wrapped(small)
    assert [head.head for head in again.grid] == [*sorted({*range(H)} - {*gone}), *range(H)]
    assert len(again.grid.blocks) == 2
    assert not again.unseen


class Latent(Attention):
    """Keys with a part of each head and a part that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.k = nn.Linear(D, 3), nn.Linear(D, H * (K - 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.projections())
        k = torch.cat([k, self.shared(x).unsqueeze(1).expand(-1, self.num_heads, -1, -1)], dim=-1)
        out: Tensor = self.o(self.mix(q, k, v).transpose(1, 2).flatten(2))
        return out


class Local(Attention):
    """A convolution between the heads and W_O that leaves channels apart."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Conv1d(D, D, 3, padding=1, groups=D)

    def after(self, context: Tensor) -> Tensor:
        said: Tensor = self.local(context.mT).mT
        return said


class Clamped(Attention):
    """A temperature for each head, all of them above the largest that is allowed, as of Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(5 + torch.rand(H, 1, 1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        return (scores * self.temperature.clamp(max=4.6)).softmax(-1) @ v


class OneKey(Attention):
    """Keys, or keys and values, of one head, which the code repeats for all."""

    both = False

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(D, K), nn.Linear(D, K if self.both else D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, K)).transpose(1, 2) for each in self.projections())
        k, v = (each.expand(-1, q.shape[1], -1, -1) for each in (k, v))
        out: Tensor = self.o(self.mix(q, k, v).transpose(1, 2).flatten(2))
        return out


class OneKeyAndValue(OneKey):
    both = True


class Scaled(Attention):
    """A number for each head between the heads and W_O."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = nn.Parameter(torch.rand(H))

    def after(self, context: Tensor) -> Tensor:
        return (context.unflatten(-1, (self.num_heads, -1)) * self.sizes[:, None]).flatten(-2)


def test_a_convolution_that_leaves_channels_apart_hides_no_head() -> None:
    (block,) = wrapped(Local).subject.blocks
    assert (block.out, block.columns) == ("layers.0.o", tuple(tuple(range(h * K, h * K + K)) for h in range(H)))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (Latent, {"q": 2 * K, "k": 2 * (K - 3), "v": 2 * K, "shared": 3}),
        (Clamped, {"temperature": 2}),
        (OneKey, {"q": 2 * K, "k": K, "v": 2 * K}),
        (OneKeyAndValue, {"q": 2 * K, "k": K, "v": K}),
        (Scaled, {"sizes": 2}),
    ],
)
def test_what_belongs_to_a_head_goes_and_what_all_heads_read_stays(kind: Any, sizes: dict[str, int]) -> None:
    heads = wrapped(kind)
    assert len(heads.score("magnitude")) == H
    assert (heads.subject.blocks[0].out, len(heads.subject.blocks)) == ("layers.0.o", 1)
    (layer,), (before,) = pruned(heads, {0: [0, 2]}).layers, heads.subject.model.layers
    assert {name: len(getattr(getattr(layer, name), "weight", getattr(layer, name))) for name in sizes} == sizes
    for name in {"temperature", "sizes"} & {*sizes}:
        assert torch.equal(getattr(layer, name), getattr(before, name)[[1, 3]])
    if kind is Clamped:
        assert isinstance(before.temperature, nn.Parameter)
        assert float(before.temperature.detach().min()) >= 5, "the trace put the user's own numbers back"


@pytest.mark.parametrize("kind", [OneKey, OneKeyAndValue])
def test_a_key_that_all_heads_share_stays_in_a_layer_without_heads(kind: Any) -> None:
    heads = wrapped(kind)
    assert [head.head for head in wrapped(heads.prune(mask={0: [0, 2]})).grid] == [1, 3]
    assert len(heads.prune(mask={0: [0, 1, 2, 3]}).layers[0].k.weight) == K


class BySums(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q[:, :, :, None] * k[:, :, None]).sum(-1).softmax(-1)
        return (weights[..., None] * v[:, :, None]).sum(-2)


class WithSink(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.pad(q @ k.mT, (0, 1), value=0.5).softmax(dim=-1)[..., :-1]
        return (weights[..., None] * v[:, :, None]).sum(-2)


class Linear(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)


class Normed(Attention):
    def after(self, context: Tensor) -> Tensor:
        return F.layer_norm(context, (D,))


class OneHead(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT).softmax(-1) @ v)
        return out


class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.score(x).softmax(dim=1) * x).sum(dim=1, keepdim=True)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv1d(D, D, 1) for _ in range(3))
        self.o = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x.mT).unflatten(1, (H, K)).mT for each in (self.q, self.k, self.v))
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).mT.flatten(1, 2)).mT
        return out


def again(reentrant: bool) -> Any:
    class Again(Attention):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=reentrant)
            return out

    return Again


def by_jit() -> Any:
    return torch.jit.trace(Attention(), X)


def one_head_fused() -> nn.Module:
    return OneHead(fused=True)


UNUSUAL = {
    **dict.fromkeys((BySums, WithSink, Linear, Pool), "weighs positions in another"),
    Normed: "its heads are mixed before",
    Convolved: "its W_O is a Conv1d, must be a linear module",
    by_jit: "is made by torch.jit, which shows nothing",
}


@pytest.mark.filterwarnings("ignore:.*(torch.jit|requires_grad)")
@pytest.mark.parametrize(("kind", "why"), UNUSUAL.items(), ids=lambda each: getattr(each, "__name__", None))
def test_attention_of_another_form_is_named_beside_others_and_refused_alone(kind: Any, why: str) -> None:
    heads = wrapped(Attention, kind)
    assert repr(heads) == "4 heads in 1 block, all with an effect, all removable; not seen: layers.1"
    with pytest.raises(ValueError, match=f"layers.0.*{why}") as refused:
        wrapped(kind)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", [OneHead, one_head_fused])
def test_attention_without_a_dimension_of_heads_is_one_head(kind: Any) -> None:
    heads = wrapped(Attention, kind)
    assert repr(heads) == "5 heads in 2 blocks, all with an effect, all removable"
    small: Any = heads.prune(mask={0: [1], 1: [0]})
    shut: Any = copy.deepcopy(heads.subject.module)
    with torch.no_grad():
        shut.layers[0].o.weight[:, K : 2 * K] = 0
        shut.layers[1].o.weight.zero_()
        assert (small(X) - shut(X)).abs().max() < 1e-6


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint as others write it, which runs without gradients."""

    @staticmethod
    def forward(ctx: Any, part: Any, count: int, *given: Tensor) -> Any:
        with torch.no_grad():
            return part(*given[:count])


class Power(torch.autograd.Function):
    """No checkpoint, though it is given a function and a number first."""

    @staticmethod
    def forward(ctx: Any, part: Any, power: int, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return part(x) ** power

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, None, 2 * x * slopes[0]


class AfterPower(Attention):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(Power.apply(torch.clone, 2, x))
        return out


def test_another_function_of_a_part_and_a_number_is_no_checkpoint() -> None:
    heads = wrapped(AfterPower)
    assert repr(heads) == "4 heads in 1 block, all with an effect, all removable"
    assert heads.score("taylor")["score"].gt(0).all()
    pruned(heads, {0: [1]})


class ByOwnCheckpoint(Attention):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = OwnCheckpoint.apply(super().forward, 1, x, *self.parameters())
        return out


@pytest.mark.filterwarnings("ignore:.*requires_grad")
@pytest.mark.parametrize("kind", [again(reentrant=False), again(reentrant=True), ByOwnCheckpoint])
def test_checkpoints_hide_nothing(kind: Any) -> None:
    heads, plain = wrapped(kind), wrapped(Attention)
    assert repr(heads) == repr(plain)
    mask = heads.mask(2, by="attribution")
    assert mask == plain.mask(2, by="attribution")
    before = torch.autograd.Function.apply
    small = heads.prune(mask=mask)
    assert (small(X) - plain.prune(mask=mask)(X)).abs().max() < 1e-6
    assert torch.autograd.Function.apply == before


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.classes = nn.Parameter(torch.randn(7, D))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(dim=-1)
        chosen = torch.einsum("bte,ebtd->btd", weights, torch.stack([each(x) for each in self.experts]))
        return chosen + weights[..., :1] * x + (x @ self.classes.T).softmax(-1) @ self.classes


def test_a_softmax_over_experts_or_classes_is_no_attention() -> None:
    assert repr(wrapped(Attention, Experts)) == "4 heads in 1 block, all with an effect, all removable"


class Pooling(Attention):
    """Attention of a learned query."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, D))
        self.q = nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (H, K)).transpose(1, 2)
            for each in (self.query.expand(len(x), 1, D), self.k(x), self.v(x))
        )
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class NormedQuery(Attention):
    """Attention whose queries are normed over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D))  # type: ignore[assignment]


def test_only_the_block_that_cannot_be_cut_says_why_not() -> None:
    heads = wrapped(Attention, NormedQuery, Attention)
    why = "its query is mixed from the heads of layers.1.q.0 (a norm?)"
    assert [block.why_not for block in heads.subject.blocks] == ["", why, ""]


def test_a_learned_query_is_cut_with_its_heads() -> None:
    heads = wrapped(Attention, Pooling)
    assert repr(heads).endswith("all removable")
    small = pruned(heads, {1: [0, 2]})
    assert small.layers[1].query.shape == (1, D // 2)


def test_blocks_whose_paths_differ_in_two_numbers_have_names_of_their_own() -> None:
    names = name_blocks([f"stages.{stage}.blocks.{n}.attn" for stage in (0, 1) for n in (0, 1)])
    assert [name.layer for name in names] == [0, 1, 2, 3]


def test_attention_that_looks_only_back_is_attention_also_by_hand() -> None:
    class Causal(Attention):
        def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    heads = wrapped(Stack(Causal), blocks=[AttentionBlock("layers.0", out="o", heads=4)])
    assert repr(heads).startswith("4 heads")


def test_weights_of_fused_attention_with_fewer_keys_are_those_of_repeated_keys() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 3, 8, generator=draw), torch.randn(1, 2, 3, 8, generator=draw)
    torch.testing.assert_close(weights_of(q, k, {}), weights_of(q, k.repeat_interleave(2, 1), {}))


def test_rows_of_other_heads_are_seen_in_a_layer_in_the_middle_too() -> None:
    def block(n: int, order: tuple[int, ...]) -> AttentionBlock:
        rows = Rows("v", tuple(tuple(range(K * h, K * h + K)) for h in order))
        return AttentionBlock(f"layers.{n}", out="o", heads=4, query="q", key="k", value=rows)

    blocks = [block(n, (0, 2, 1, 3) if n == 1 else (0, 1, 2, 3)) for n in range(3)]
    assert "removed differ" in wrapped(Stack(Attention, Attention, Attention), blocks=blocks).proven.why_not
