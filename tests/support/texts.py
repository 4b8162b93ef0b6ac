"""A small classifier of texts, with its batches, and its heads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mhaprune
from mhaprune import losses
from mhaprune.api.wrap import Heads
from support.attention import Attention

Change = Callable[[Tensor], Tensor]


def ids(seed: int, *shape: int, below: int = 11) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def texts(count: int = 2, examples: int = 6, length: int = 7) -> list[tuple[Tensor, Tensor]]:
    """Batches of inputs and labels; every batch is longer than the one before."""
    return [(ids(n, examples, length + n), ids(50 + n, examples, below=3)) for n in range(count)]


class Narrow(Attention):
    def __init__(self) -> None:
        super().__init__(16)


class TimeFirst(Narrow):
    """Computes (T, B, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Net(nn.Module):
    """Two layers; `after` changes what the first adds."""

    def __init__(self, kind: type[Attention] = Narrow, after: Change | None = None, calls: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = nn.Embedding(11, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.after, self.calls = after or (lambda x: x), calls
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        time_first = isinstance(self.layers[0], TimeFirst)
        x = self.embedding(x).transpose(0, 1) if time_first else self.embedding(x)
        for layer in [*self.layers] * self.calls:
            said = layer(x)
            x = x + (self.after(said) if layer is self.layers[0] else said)
        return self.output(x.mean(dim=0 if time_first else 1))


def wrapped(model: nn.Module, **how: Any) -> Heads:
    split = how.pop("split", texts())
    how = {"score": split, "choose": split, "report": split} | how
    return mhaprune.wrap(model.eval(), how.pop("loss", losses.classification), **how)
