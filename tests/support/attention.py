"""Attention that is not ours, stacks of it, and heads that are closed by hooks which know nothing of blocks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhaprune

WIDTH, HEADS, HEAD_DIM = 32, 4, 8
X = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """Projections of one's own, and attention by a function; tests override a part of it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def projections(self) -> tuple[nn.Module, ...]:
        return self.q, self.k, self.v

    def made(self, x: Tensor) -> Tensor:
        return x

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def after(self, context: Tensor) -> Tensor:
        return context

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.made(f(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in self.projections())
        out: Tensor = self.o(self.after(self.mix(*parts).transpose(1, 2).flatten(2)))
        return out


class Stack(nn.Module):
    """Layers that add to a residual stream, in evaluation."""

    def __init__(self, *kinds: Callable[[], nn.Module], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def square(output: Any, batch: Any) -> Tensor:
    """A loss of every example that all numbers change."""
    return (output[0] if isinstance(output, tuple) else output).flatten(1).square().mean(dim=1)


def wrapped(*kinds: Any, x: Tensor = X, **how: Any) -> Any:
    """The heads of a stack of these layers, or of a model."""
    model = kinds[0] if isinstance(kinds[0], nn.Module) else Stack(*kinds)
    return mhaprune.wrap(model, square, score=[{"x": x}], call=lambda model, batch: model(batch["x"]), **how)


def pruned(heads: Any, mask: Any, x: Tensor = X) -> Any:
    """The smaller model, which computes what the whole one does with these heads closed."""
    small = heads.prune(mask=mask)
    with torch.no_grad(), heads.closed(mask) as closed:
        one, other = small(x), closed(x)
    torch.testing.assert_close(getattr(one, "logits", one), getattr(other, "logits", other))
    return small


def close_by_hooks(outs: Sequence[nn.Module], head_dim: int, mask: Mapping[int, Sequence[int]]) -> None:
    """Let the output projections, by their number, read zeros from some heads from now on."""
    for n, heads in mask.items():
        columns = torch.tensor([head * head_dim + place for head in heads for place in range(head_dim)])
        outs[n].register_forward_pre_hook(lambda _, given, at=columns: (given[0].index_fill(-1, at, 0.0), *given[1:]))
