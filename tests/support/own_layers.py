"""Attention as others write it, in a small classifier, and what must hold of it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mhaprune
from mhaprune import losses
from mhaprune.hooks.eval_mode import ModelCall
from mhaprune.subjects.batches import Batches

WIDTH, HEADS = 16, 4
GONE = {0: [1, 3], 1: [0]}
"""The heads that are removed, by layer."""


class Layer(nn.Module):
    """The layer of the course: heads are folded into the examples, and the outputs of the heads pass `through`."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads = heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def fold(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)
        return x.reshape(-1, x.shape[2], x.shape[3])

    def through(self, x: Tensor) -> Tensor:
        """Change the outputs of the heads, (B, H, T, K)."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fold(self.W_q(x)), self.fold(self.W_k(x)), self.fold(self.W_v(x))
        said = torch.bmm((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), v)
        said = self.through(said.reshape(-1, self.num_heads, x.shape[1], q.shape[-1]))
        return self.W_o(said.permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[1], -1))


def by_head(layer: Layer, x: Tensor) -> list[Tensor]:
    """Return queries, keys and values, all (B, H, T, K)."""
    maps = (layer.W_q, layer.W_k, layer.W_v)
    return [f(x).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for f in maps]


class Net(nn.Module):
    """A classifier of texts with two layers of attention."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.end = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for layer in self.layers:
            y = y + layer(y)
        return self.end(y.mean(1))


def made(layer: Callable[[], nn.Module], net: type[Net] = Net, seed: int = 0) -> Net:
    """Return a network with random numbers also where layers begin with equal ones."""
    torch.manual_seed(seed)
    model = net(layer).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def batches(seed: int = 1) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((6, 7), (5, 7), (4, 9))
    return [
        {"x": torch.randint(20, shape, generator=draw), "labels": torch.randint(3, shape[:1], generator=draw)}
        for shape in shapes
    ]


def call(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    return model(batch["x"])


def called(model: nn.Module) -> ModelCall:
    return ModelCall(model, Batches.of(batches(), "score").first(1), call)


def wrapped(model: nn.Module, **how: Any) -> mhaprune.Heads:
    return mhaprune.wrap(model, losses.classification, score=batches(), call=call, **how)


def apart(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two models on the batches."""
    with torch.no_grad():
        return max(float((call(one, batch) - call(other, batch)).abs().max()) for batch in batches(2))


def closed(model: nn.Module, outs: Sequence[str], gone: Mapping[int, Sequence[int]] = GONE) -> nn.Module:
    """Return a copy in which these heads are closed by hand: W_O reads zeros from them."""
    shut = copy.deepcopy(model)
    for layer, heads in gone.items():
        weight: Any = shut.get_submodule(outs[layer]).weight
        K = weight.shape[1] // HEADS
        with torch.no_grad():
            for h in heads:
                weight[:, h * K : (h + 1) * K] = 0
    return shut


def check(
    layer: Callable[[], nn.Module],
    folder: Path,
    out: str = "W_o",
    net: type[Net] = Net,
    gone: Mapping[int, Sequence[int]] = GONE,
) -> tuple[Net, mhaprune.Heads, nn.Module]:
    """Check that heads of two such layers are removed exactly, saved, and read again, and that their effects are those
    of heads closed by hand. Return the model, the wrapped model, and the model without the heads."""
    model = made(layer, net).double()
    before = copy.deepcopy(model.state_dict())
    heads, outs = wrapped(model), [f"layers.{n}.{out}" for n in range(2)]
    assert f"{2 * HEADS} heads in 2 blocks" in repr(heads)
    assert repr(heads).endswith("all removable")
    small = heads.prune(mask=gone)
    assert apart(small, closed(model, outs, gone)) < 1e-9
    smaller: Any = small
    assert smaller.layers[0].get_submodule(out).weight.shape[1] == WIDTH - len(gone[0]) * WIDTH // HEADS
    mhaprune.save(small, folder)
    assert apart(small, mhaprune.load(folder, model=made(layer, net, seed=5).double())) == 0
    rises = heads.score("ablation")
    by_hand = [effect(model, outs, n, h) for n in range(2) for h in range(HEADS)]
    assert torch.allclose(torch.tensor(rises.sort_index()["score"].tolist()), torch.tensor(by_hand), atol=1e-6)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return model, heads, small


@torch.no_grad()
def loss(model: nn.Module) -> float:
    """Return the mean loss on the batches."""
    logits = torch.cat([call(model, batch) for batch in batches()])
    return float(nn.functional.cross_entropy(logits, torch.cat([batch["labels"] for batch in batches()])))


def effect(model: nn.Module, outs: Sequence[str], layer: int, head: int) -> float:
    """Return the rise of the loss if a head is closed by hand."""
    return loss(closed(model, outs, {layer: [head]})) - loss(model)


def check_refit(heads: mhaprune.Heads) -> None:
    """Check that a refit brings back a part of what a removal lost, on the examples that it was fitted to."""
    model = heads.subject.module
    plain, fitted = (heads.prune(mask=GONE, refit=refit) for refit in (False, True))

    def error(small: nn.Module) -> float:
        with torch.no_grad():
            return sum(float((call(small, batch) - call(model, batch)).square().sum()) for batch in batches())

    assert error(fitted) < error(plain)
