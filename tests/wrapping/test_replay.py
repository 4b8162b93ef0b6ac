"""Passes that are computed in part: with many masks at once, and from map to map, against whole passes."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.api.wrap import wrap
from mhaprune.hooks.replay import Map, Replay, find_maps, recorders, walk
from mhaprune.measure.outcomes import all_open, measure, measure_masks
from support import own_layers
from support.classifier import Classifier, batches


class InPlace(Classifier):
    """Adds to the output of its embedding where that lies."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for attention, forward in zip(self.attention, self.feed_forward, strict=True):
            x += attention(x, x, x, key_padding_mask=attention_mask == 0)[0]
            x += forward(x.relu())
        return {"logits": self.output(x.mean(dim=1))}


class SharedNorm(Classifier):
    """Calls one module in every layer, and writes to what it returned the first time."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer, (attention, forward) in enumerate(zip(self.attention, self.feed_forward, strict=True)):
            x = self.feed_forward[0](x)
            if layer == 0:
                x += 1
            x = x + attention(x, x, x, key_padding_mask=attention_mask == 0)[0]
            x = x + forward(x.relu())
        return {"logits": self.output(x.mean(dim=1))}


class Steered(Classifier):
    """A hook of the user's changes what a module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.feed_forward[0].register_forward_hook(lambda module, inputs, output: output.tanh() + 1)


class Beside(nn.Module):
    """It writes to a list in what it is given, to its argument, or to an attribute, and returns nothing."""

    def __init__(self, inner: nn.Module, what: str) -> None:
        super().__init__()
        self.inner, self.what, self.seen = inner, what, torch.zeros(())

    def forward(self, x: Tensor, given: Any) -> None:
        y = self.inner(x.relu())
        if self.what == "list":
            given.notes.append(y.mean(dim=(1, 2), keepdim=True))
        elif self.what == "attribute":
            self.seen = y.square().mean(dim=(1, 2))[:, None]
        else:
            x += y


class Writes(Classifier):
    """Modules that do more than return something: what a later one, or the model, reads is written by earlier ones."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.feed_forward = nn.ModuleList(Beside(each, what) for each in self.feed_forward)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x, given = self.embedding(input_ids), SimpleNamespace(notes=[])
        for each in self.feed_forward:
            each.seen = torch.zeros(())
        for attention, forward in zip(self.attention, self.feed_forward, strict=True):
            x = x + attention(x, x, x, key_padding_mask=attention_mask == 0)[0] + sum(given.notes)
            forward(x, given)
        return {"logits": self.output(x.mean(dim=1)) + sum(each.seen for each in self.feed_forward) * torch.arange(3)}


WRITES = [partial(Writes, what) for what in ("list", "argument", "attribute")]


@pytest.mark.parametrize("kind", [InPlace, SharedNorm, Steered, *WRITES])
def test_many_masks_at_once_lose_what_each_loses_alone(kind: Callable[[], Classifier]) -> None:
    """What was written to in place is computed again, and does not take what a later call returned."""
    heads = wrap(kind(), losses.classification, score=batches(2))
    gates_MN = all_open(heads.subject, 1 + len(heads.grid))
    gates_MN[1:].fill_diagonal_(0.0)
    split = heads.splits["score"]
    plain = torch.stack([measure(heads.subject, split, gates_N).loss for gates_N in gates_MN])
    torch.testing.assert_close(measure_masks(heads.subject, split, gates_MN).loss, plain)


def test_a_gate_that_is_neither_open_nor_closed_is_a_gate_too() -> None:
    """Half open, nearly open, more than open, or negative: in one block or in both."""
    heads = wrap(Classifier(), losses.classification, score=batches(2))
    split, values = heads.splits["score"], torch.tensor([0.4, 0.6, 0.999, 1.001, 2.0, -1.0])
    gates_MN = all_open(heads.subject, 3 * len(values))
    for m, value in enumerate(values.repeat(3)):
        gates_MN[m, [slice(0, 1), slice(4, 5), slice(0, 8, 4)][m // len(values)]] = value
    plain = torch.stack([measure(heads.subject, split, gates_N).loss for gates_N in gates_MN])
    assert len(plain.sum(dim=1).unique()) == len(plain), "each of them is seen"
    torch.testing.assert_close(measure_masks(heads.subject, split, gates_MN).loss, plain)


class Counted(nn.Linear):
    computed = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.computed += 1
        return super().forward(x)


class Layer(nn.Module):
    """x + W_2 relu(W_1 norm(x)), then the same with one map alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.out = nn.LayerNorm(4), Counted(4, 6), nn.Linear(6, 4)
        self.last_norm, self.last = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.first(self.norm(x)).relu())
        y: Tensor = x + self.last(self.last_norm(x))
        return y


class Stack(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()] * 3 if shared else (Layer() for _ in range(3)))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.norm(x)
        return y


def whole_pass(model: nn.Module, each: Map, x: Tensor) -> list[Tensor]:
    """What a map read and what stood in the stream when the call of its reader came, in a pass to the end."""
    read: list[Tensor] = []
    found: list[list[Tensor]] = []
    assert each.reader is not None
    hooks = [
        model.get_submodule(each.path).register_forward_pre_hook(lambda module, inputs: read.append(inputs[0])),
        model.get_submodule(each.reader).register_forward_pre_hook(
            lambda module, inputs: found.append([*read[-1:], inputs[0]])
        ),
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return found[each.call]


@pytest.mark.parametrize("shared", [False, True])
@torch.no_grad()
def test_maps_that_change_on_the_way_decide_what_follows(shared: bool) -> None:
    torch.manual_seed(0)
    model = Stack(shared).double()
    plain, xs = copy.deepcopy(model), [torch.randn(5, 4).double(), torch.randn(2, 4).double()]
    maps = find_maps(model, [], partial(model, xs[0][:1]))
    assert [each.path for each in maps] == [
        f"layers.{i}.{name}" for i in range(1 if shared else 3) for name in ("out", "last")
    ]
    Counted.computed = computed = 0
    for each, parts in walk(model, maps, [partial(model, x) for x in xs]):
        computed, Counted.computed = computed + Counted.computed, 0
        for part, x in zip(parts, xs, strict=True):
            for one, other in zip(part, whole_pass(plain, each, x), strict=True):
                assert torch.equal(one, other)
        Counted.computed = 0
        for one in (model, plain):
            weight = one.get_submodule(each.path).weight
            assert isinstance(weight, Tensor)
            weight.add_(1.0)
    assert computed == (2 if shared else 1) * 3 * len(xs), "all maps together cost one pass if no layer is shared"


def test_only_what_can_be_replayed_is_kept() -> None:
    """Neither the map, whose input may change, nor the modules within a call that is kept whole."""
    model = nn.Sequential(Layer(), Layer())
    replay = Replay(model, ["0.out", "1.out"])
    with recorders(model) as record:
        record(replay)
        model(torch.randn(2, 4))
    paths = {module: path for path, module in model.named_modules()}
    intact = [paths[call.module] for call in replay.calls if call.intact]
    assert intact == ["0.norm", "0.first", "0", "1.norm", "1.first", ""]


def test_values_that_are_averaged_are_no_sublayer() -> None:
    """Weights of uniform attention add up to 1 also for each key."""
    model = own_layers.made(partial(own_layers.Layer, heads=1)).double()
    for layer in model.layers:
        nn.init.zeros_(layer.W_q.weight)
    found = find_maps(model, ["layers.0.W_o", "layers.1.W_o"], partial(model, torch.ones(1, 8, dtype=torch.long)))
    assert found == [Map("layers.0.W_o", "layers.1"), Map("layers.1.W_o", None)]
