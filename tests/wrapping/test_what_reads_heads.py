"""The maps that read the outputs of heads: one W_O, several, or more than that."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhaprune
from mhaprune.discovery.found import made_of
from mhaprune_literature.attention import Confidence
from support.own_layers import (
    GONE,
    HEADS,
    WIDTH,
    Layer,
    Net,
    apart,
    batches,
    call,
    check,
    check_refit,
    closed,
    made,
    wrapped,
)

K = WIDTH // HEADS


class Joint(nn.Module):
    """Two streams attend together, and each has an output projection of its own, as in Stable Diffusion 3."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.add_qkv = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.W_o, self.to_add_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def through(self, said: Tensor) -> Tensor:
        """Change the outputs of the heads, (B, H, T, K)."""
        return said

    def forward(self, x: Tensor) -> Tensor:
        few, many = x[:, :2], x[:, 2:]
        both = torch.cat([self.add_qkv(few), self.qkv(many)], dim=1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in both.chunk(3, -1))
        said = self.through(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2).flatten(2)
        return torch.cat([self.to_add_out(said[:, :2]), self.W_o(said[:, 2:])], dim=1)


class JointGated(Joint):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.linspace(-1, 2, HEADS))

    def through(self, said: Tensor) -> Tensor:
        return said * self.gates.softmax(0)[:, None, None]


def of_both(model: nn.Module, gone: dict[int, list[int]]) -> nn.Module:
    first = closed(model, [f"layers.{n}.W_o" for n in range(2)], gone)
    return closed(first, [f"layers.{n}.to_add_out" for n in range(2)], gone)


@pytest.mark.parametrize("kind", [Joint, JointGated])
def test_heads_that_two_maps_read_at_different_positions_are_closed_and_cut_in_both(kind: Any, tmp_path: Path) -> None:
    model = made(kind).double()
    heads = wrapped(model)
    assert repr(heads) == "8 heads in 2 blocks, all with an effect, all removable"
    with heads.closed(GONE) as gated:
        assert apart(gated, of_both(model, GONE)) < 1e-9
    for gone in (GONE, {0: [0, 1, 2, 3], 1: [2]}):
        small: Any = heads.prune(mask=gone)
        assert apart(small, of_both(model, gone)) < 1e-9
        mhaprune.save(small, tmp_path)
        assert apart(mhaprune.load(tmp_path, model=made(kind, seed=5).double()), small) == 0
    assert small.layers[1].to_add_out.in_features == small.layers[1].W_o.in_features == WIDTH - K
    shut, effects = batches(), heads.score("ablation").sort_index()["score"].tolist()
    for n, score in enumerate(effects):
        one = of_both(model, {n // HEADS: [n % HEADS]})
        with torch.no_grad():
            losses = [
                torch.cat([F.cross_entropy(call(of, each), each["labels"], reduction="none") for each in shut]).mean()
                for of in (one, model)
            ]
        assert abs(float(losses[0] - losses[1]) - score) < 1e-6


def test_scores_by_the_weights_of_one_w_o_are_refused_for_joint_attention() -> None:
    heads = wrapped(made(Joint))
    with pytest.raises(ValueError, match=r"needs one W_O for all positions, layers.0 has .*to_add_out, .*W_o; leave"):
        heads.score("magnitude")
    held = heads.subject.held_weights().tolist()
    assert held[0] == 2 * WIDTH * K + 2 * 3 * K * (WIDTH + 1)


def test_a_refit_of_joint_attention_is_better_than_none() -> None:
    check_refit(wrapped(made(Joint)))


class OneByConvolution(Joint):
    """One of the two maps is a 1×1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.to_add_out = nn.Conv1d(WIDTH, WIDTH, 1)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        few, many = x[:, :2], x[:, 2:]
        both = torch.cat([self.add_qkv(few), self.qkv(many)], dim=1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in both.chunk(3, -1))
        said = self.through(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2).flatten(2)
        return torch.cat([self.to_add_out(said[:, :2].mT).mT, self.W_o(said[:, 2:])], dim=1)


def test_two_maps_of_one_block_may_have_their_features_in_other_dimensions() -> None:
    model = made(OneByConvolution).double()
    assert apart(wrapped(model).prune(mask=GONE), of_both(model, GONE)) < 1e-9


class OntoScores(Layer):
    """The scores of a layer are added to those of the next, as in PatchTST."""

    fused = False

    def forward(self, x: Tensor, before: Tensor | None = None) -> Any:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.mT
        if self.fused:
            said = F.scaled_dot_product_attention(q, k, v, attn_mask=before)
        else:
            said = (scores if before is None else scores + before).softmax(-1) @ v
        return self.W_o(said.transpose(1, 2).flatten(2)), scores


class OntoMask(OntoScores):
    fused = True


class Onward(Net):
    def forward(self, x: Tensor) -> Tensor:
        y, scores = self.embed(x), None
        for layer in self.layers:
            out, scores = layer(y, scores)
            y = y + out
        return self.end(y.mean(1))


@pytest.mark.parametrize("kind", [OntoScores, OntoMask])
def test_layers_that_hand_scores_on_are_gated_and_say_that_their_heads_could_only_go_together(kind: Any) -> None:
    model = made(kind, Onward).double()
    heads = wrapped(model)
    assert re.search(
        r"none removable: layers.0: layers.0.W_[qk] makes scores of layers.0 and of layers.1, whose heads", repr(heads)
    )
    with heads.closed(GONE) as gated:
        assert apart(gated, closed(model, ["layers.0.W_o", "layers.1.W_o"])) < 1e-9


class Turned(Layer):
    """The width of a head stands before the heads, so that W_O reads the heads in turns."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.num_heads)).permute(0, 3, 1, 2) for f in (self.W_q, self.W_k, self.W_v))
        return self.W_o(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1).flatten(2))


def test_columns_of_heads_may_stand_in_turns() -> None:
    model: Any = made(Turned).double()
    shut: Any = copy.deepcopy(model)
    with torch.no_grad():
        for n, heads in {0: [1, 3], 1: [0, 1, 2, 3]}.items():
            for h in heads:
                shut.layers[n].W_o.weight[:, h::HEADS] = 0
    assert apart(wrapped(model).prune(mask={0: [1, 3], 1: [0, 1, 2, 3]}), shut) < 1e-9


class NearAndFar(Layer):
    """Two calls of attention, and one W_O for both."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        far = F.scaled_dot_product_attention(q[:, :2], k[:, :2], v[:, :2])
        near = F.scaled_dot_product_attention(q[:, 2:], k[:, 2:], v[:, 2:], is_causal=True)
        return self.W_o(torch.cat([far, near], 1).transpose(1, 2).flatten(2))


def test_heads_of_two_calls_that_one_map_reads_are_all_gated() -> None:
    model = made(NearAndFar).double()
    heads, outs = wrapped(model), ["layers.0.W_o", "layers.1.W_o"]
    assert "8 heads in 2 blocks" in repr(heads)
    assert re.search("none removable: its heads are computed by several calls .*, and masked and removed", repr(heads))
    with heads.closed(GONE) as gated:
        assert apart(gated, closed(model, outs)) < 1e-9
    with pytest.raises(ValueError, match="needs attention weights"):
        heads.score(Confidence())


class NoOut(nn.Module):
    """The outputs of the heads are added to the stream without an output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Bent(NoOut):
    """A sum of heads and states passes an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.skip: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x) + self.skip(x))


class BentMap(Bent):
    """The states are made by a map of the layer, which reads no more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Linear(WIDTH, WIDTH)


class Onto(Layer):
    """The input of W_O is added to its output, so that later layers read it too."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return said + self.W_o(said).relu()


class Again(Layer):
    """W_O is called again, for what it said or for the input of the layer, or it reads a state of a position more."""

    how = "input"

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        if self.how == "place":
            return self.W_o(torch.cat([x[:, :1], said], dim=1))[:, 1:]
        return self.W_o(x) + self.W_o(said) if self.how == "input" else self.W_o(self.W_o(said))


class OfItself(Again):
    how = "itself"


class OneMore(Again):
    how = "place"


class Pooled(Bent):
    """The same state of the whole text is added at all positions."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(NoOut.forward(self, x) + x.mean(1, keepdim=True))


class OneOut(Net):
    """Two layers, each with heads of its own, have one W_O."""

    def __init__(self, layer: Callable[[], Any]) -> None:
        super().__init__(layer)
        self.layers[1].W_o = self.layers[0].W_o


class MeanOfHeads(nn.Module):
    """The mean of what the heads say goes through W_O, as in temporal fusion transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.W_v, self.W_o = nn.Linear(WIDTH, K), nn.Linear(K, WIDTH)
        self.queries, self.keys = (nn.ModuleList(nn.Linear(WIDTH, K) for _ in range(HEADS)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        v, pairs = self.W_v(x), zip(self.queries, self.keys, strict=True)
        return self.W_o(torch.stack([(q(x) @ k(x).mT).softmax(-1) @ v for q, k in pairs]).mean(0))


class Straight(Net):
    """A network without a stream: each layer reads what the one before it computes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for layer in self.layers:
            y = layer(y)
        return self.end(y.mean(1))


class ReadTwice(Layer):
    """Another map reads the heads too."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.W_o(said) * self.other(said).sigmoid()


@pytest.mark.parametrize(
    ("kind", "net", "why"),
    [
        (NoOut, Net, r"layers.0 \(NoOut\): what reads its heads reads their sum with other states"),
        (Bent, Straight, r"layers.0 \(Bent\): what reads its heads reads their sum with other states"),
        (BentMap, Straight, r"layers.0 \(BentMap\): what reads its heads reads their sum with other states"),
        (Pooled, Straight, r"layers.0 \(Pooled\): what reads its heads reads their sum with other states"),
        (Layer, OneOut, "its W_O, layers.0.W_o, is called for other states too"),
        (MeanOfHeads, Net, "its heads are mixed before the first linear module"),
        (Again, Net, "its W_O, layers.0.W_o, is called for other states too"),
        (OfItself, Net, "its W_O, layers.0.W_o, is called for other states too"),
        (OneMore, Net, "its W_O, layers.0.W_o, is called for other states too"),
        (Onto, Net, "layers.0.W_o: is not all that reads its units"),
        (Onto, Straight, "layers.0.W_o: is not all that reads its units"),
        (ReadTwice, Net, "layers.0.W_o: is not all that reads its units"),
        (ReadTwice, Straight, "layers.0.W_o: is not all that reads its units"),
    ],
)
def test_heads_that_more_than_their_maps_read_are_refused(kind: Any, net: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        wrapped(made(kind, net).double())


def test_a_layer_that_no_gate_closes_is_left_out_beside_others() -> None:
    kinds = iter([ReadTwice, Layer])
    model = made(lambda: next(kinds)()).double()
    heads = wrapped(model)
    assert repr(heads) == "4 heads in 1 block, all with an effect, all removable; not seen: layers.0"
    assert apart(heads.prune(mask={1: [2]}), closed(model, ["", "layers.1.W_o"], {1: [2]})) < 1e-9


class AlsoOfOthers(Layer):
    """W_O reads a first position from one call of attention, and the others from a second one."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        first = F.scaled_dot_product_attention(q[:, :, :1], k, v)
        rest = F.scaled_dot_product_attention(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:])
        return self.W_o(torch.cat([first, rest], dim=2).transpose(1, 2).flatten(2))


class Enhanced(Layer):
    """A convolution that reads each channel of the values alone is added to the heads, and they pass an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.W_o((said + self.near(v.transpose(1, 2).flatten(2).mT).mT).sigmoid())


class NormedGate(Layer):
    """Behind a norm with a bias is a gate that a map makes of the text: what is left of silent heads is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.GroupNorm(HEADS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.W_o(self.norm(said.flatten(0, 1)).view_as(said) * F.silu(self.gate(x)))


class FirstIsOwn(Layer):
    """At the first position each head says its own value."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = torch.cat([v[:, :, :1], ((q @ k.mT).softmax(-1) @ v)[:, :, 1:]], dim=2)
        return self.W_o(said.transpose(1, 2).flatten(2))


class OtherValues(Layer):
    """The weights weigh what another map makes too, and both are added."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.W_q, self.W_k, self.W_v, self.more
        q, k, v, more = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in maps)
        weights = (q @ k.mT).softmax(-1)
        return self.W_o((weights @ v + weights @ more).transpose(1, 2).flatten(2))


class Dropped(Layer):
    """A function returns what the heads say, which is dropped, and the weights, which the layer multiplies again."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = (q @ k.mT).softmax(-1)
        return weights @ v, weights

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        _, weights = self.attend(q, k, v)
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [Enhanced, Dropped, NormedGate, FirstIsOwn, OtherValues])
def test_what_w_o_reads_of_the_heads_is_found(kind: Any, tmp_path: Path) -> None:
    check(kind, tmp_path)


def test_heads_of_other_positions_are_no_other_states(tmp_path: Path) -> None:
    check(AlsoOfOthers, tmp_path)


def test_heads_that_the_next_layer_reads_alone_are_gated_at_its_input() -> None:
    model: Any = made(NoOut, Straight).double()
    heads = wrapped(model)
    silent = copy.deepcopy(model)
    with torch.no_grad():
        silent.layers[0].v.weight[:K] = silent.layers[0].v.bias[:K] = 0
    with heads.closed({0: [0]}) as gated:
        assert apart(gated, silent) < 1e-9
    with pytest.raises(ValueError, match="can be gated, not removed"):
        heads.prune(mask={0: [0]})


def test_states_of_a_part_without_gradients_are_followed_no_further() -> None:
    x, plain = torch.ones(2, requires_grad=True), torch.ones(2)
    assert made_of(x * 2, [plain, x])
    assert not made_of(x * 2, [plain])
    assert not made_of(plain, [x])


class AllPlaces(Net):
    """The last map reads all positions side by side, and there is no W_O."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(layer)
        self.end = nn.Linear(7 * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.layers[0](self.embed(x[:, :7])).flatten(1))


def test_heads_that_a_map_reads_at_all_positions_have_columns_at_each() -> None:
    heads = wrapped(made(NoOut, AllPlaces).double())
    assert heads.subject.blocks[0].columns[1] == tuple(n for n in range(7 * WIDTH) if n % WIDTH // K == 1)


class Beside(Layer):
    """W_O reads other features before the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.ff, self.W_o = nn.Linear(WIDTH, 8), nn.Linear(WIDTH + 8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.W_o(torch.cat([self.ff(x).relu(), said], dim=-1))


def test_features_before_the_heads_stay_and_one_head_must() -> None:
    model: Any = made(Beside).double()
    heads, shut = wrapped(model), copy.deepcopy(model)
    with torch.no_grad():
        shut.layers[0].W_o.weight[:, 8 + K : 8 + 2 * K] = 0
    assert apart(heads.prune(mask={0: [1]}), shut) < 1e-9
    with pytest.raises(ValueError, match="layers.0: must keep a head, because layers.0.W_o reads others before"):
        heads.prune(mask={0: [0, 1, 2, 3]})


def test_a_single_layer_keeps_its_number() -> None:
    kinds = iter([Joint, Layer])
    heads = wrapped(made(lambda: next(kinds)()))
    small: Any = heads.prune(mask={0: [0, 1, 2, 3]})
    assert [head.layer for head in wrapped(small).grid] == [1] * HEADS
