"""Feed-forward layers with something in between, with two readers, with experts, or in a module with heads."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhaprune
from mhaprune import losses
from mhaprune.api.wrap import Heads

WIDTH, HIDDEN = 12, 10


class Block(nn.Module):
    """Attention and a feed-forward layer in one module, as people write it."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.heads = 3
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.between = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), between

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def middle(self, hidden: Tensor) -> Tensor:
        return hidden if self.between is None else self.between(hidden.mT).mT

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        return x + self.down(F.gelu(self.middle(self.up(x))))


class TwoReaders(Block):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        hidden = F.gelu(self.up(x))
        return x + self.down(hidden) + self.other(hidden).tanh()


class OwnScale(Block):
    """Numbers for each neuron in no module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def middle(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class Experts(Block):
    """Top-1 experts, each called with the tokens that are sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        layers = (nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.experts = nn.ModuleList(nn.Sequential(*map(copy.deepcopy, layers)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        flat = F.layer_norm(x, x.shape[-1:]).flatten(0, 1)
        sent = self.router(flat).argmax(dim=-1)
        out = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            out = out.index_add(0, at := (sent == n).nonzero()[:, 0], expert(flat[at]))
        return x + out.view_as(x)


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.output(x.mean(dim=1))


def net(kind: Any, **how: Any) -> Net:
    torch.manual_seed(0)
    model = Net(kind(**how), kind(**copy.deepcopy(how))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


def texts(count: int = 3, size: int = 4) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randint(20, (size, 6), generator=draw), torch.arange(size) % 3) for _ in range(count)]


def wrapped(model: nn.Module, units: Any = ("head", "neuron"), size: int = 4) -> Heads:
    return mhaprune.wrap(model, losses.classification, score=texts(size=size), units=units)


def normed() -> nn.Module:
    norm = nn.BatchNorm1d(HIDDEN)
    nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
    return norm


BETWEEN = {
    "convolution by channel": lambda: nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN),
    "batch norm": normed,
    "prelu": lambda: nn.PReLU(HIDDEN),
    "two of them": lambda: nn.Sequential(nn.Conv1d(HIDDEN, HIDDEN, 1, groups=HIDDEN), normed()),
}


@pytest.mark.parametrize("kind", BETWEEN)
def test_what_stands_between_is_cut_along(kind: str, tmp_path: Path) -> None:
    model = net(Block, between=BETWEEN[kind]())
    heads = wrapped(model)
    assert repr(heads) == "26 units in 4 blocks, all with an effect, all removable"
    gone = {"neuron.0": [0, 2, 3, 7], "neuron.1": [9], "blocks.1": [1]}
    small = heads.prune(mask=gone)
    with heads.closed(gone) as closed:
        torch.testing.assert_close(small(texts()[0][0]), closed(texts()[0][0]))
    again = wrapped(small).prune(mask={"neuron.0": [1, 4]})
    mhaprune.save(again, tmp_path)
    torch.testing.assert_close(mhaprune.load(tmp_path, model=model)(texts()[0][0]), again(texts()[0][0]))
    sizes = [tuple(parameter.shape) for name, parameter in again.named_parameters() if "blocks.0.between" in name]
    assert sizes
    assert {shape[0] for shape in sizes} == {HIDDEN - 6}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OwnScale, "between blocks.0.up and blocks.0.down, or beside them, something counts the neurons"),
    ],
)
def test_what_cannot_be_cut_is_named_and_the_rest_is_removable(kind: Any, reason: str) -> None:
    heads = wrapped(net(kind))
    neurons = [block for block in heads.grid.blocks if "neuron" in block.site]
    assert heads.proven.stuck.keys() == {*neurons}
    assert heads.proven.stuck[neurons[0]] == reason
    total, free = len(heads.grid), 6
    with pytest.raises(
        ValueError, match=rf"^keep=0.1: keeps {round(total / 10)} units, but {total - free} must stay, "
    ):
        heads.prune(keep=0.1, by="gate_output")
    assert len(heads.mask(keep=total - 2, by="gate_output").removed) == 2


def test_neurons_that_two_maps_read_are_left_out() -> None:
    assert "6 heads in 2 blocks" in (said := repr(wrapped(net(TwoReaders))))
    assert said.endswith("not seen: blocks.0.down, blocks.0.other, blocks.1.down, blocks.1.other")
    with pytest.raises(ValueError, match="has no neurons: no linear map has inputs"):
        wrapped(net(TwoReaders), ("neuron",))


def test_neurons_beside_heads_leave_them_removable() -> None:
    for units in (("head",), ("neuron",), ("head", "neuron")):
        assert repr(wrapped(net(Block), units)).endswith("all with an effect, all removable")


@pytest.mark.parametrize("size", [1, 4])
def test_experts_are_left_out_and_heads_stay(size: int) -> None:
    heads = wrapped(net(Experts), size=size)
    assert {head.site for head in heads.grid} == {"blocks"}
    assert "not seen: blocks.0.experts.0.2, blocks.0.experts.1.2, " in repr(heads)
    heads.prune(keep=0.5, by="gate_output", refit=True)
    with pytest.raises(ValueError, match="has no neurons: no linear map has inputs"):
        wrapped(net(Experts), ("neuron",), size)


class Mixed(Block):
    """A feed-forward layer that reads the positions of all examples in another order, by a copy of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        order = torch.arange(len(x) * x.shape[1]).view(len(x), -1).T.flatten()
        out = torch.empty_like(x.flatten(0, 1))
        out[order] = self.down(F.gelu(self.up(x.flatten(0, 1)[order])))
        return x + out.view_as(x)


def test_neurons_whose_rows_are_not_those_of_the_examples_are_left_out() -> None:
    heads = wrapped(net(Mixed))
    assert {head.site for head in heads.grid} == {"blocks"}
    assert "not seen: blocks.0.down, blocks.1.down" in repr(heads)


class Twice(Block):
    """Two attentions in one module, each with a W_O of its own, of the same queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        x = super().attend(x)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + self.second(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def test_two_attentions_of_a_module_that_share_their_maps_go_together() -> None:
    heads = wrapped(net(Twice), ("head",))
    assert repr(heads).startswith(
        "12 heads in 4 blocks, all with an effect, none removable: blocks.0: blocks.0.qkv makes"
    )
