"""Tell which leading dimensions of queries, keys and values are those of heads.

Dimensions: T = positions, H = heads, K = width of a head, W = windows, E = examples or windows.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mhaprune.discovery.layouts import Leaves, rows_read


class Leading(NamedTuple):
    """The leading dimensions of attention, in which dimensions of heads stand beside others, as those of windows."""

    sizes: tuple[int, ...]
    heads: tuple[int, ...]
    """The places of the dimensions of heads."""

    @property
    def order(self) -> list[int]:
        """The places of all dimensions, those of heads last."""
        return [*(n for n in range(len(self.sizes)) if n not in self.heads), *self.heads]

    def by_head(self, x: Tensor) -> Tensor:
        """Return a tensor (*lead, T, K) as (E, H, T, K)."""
        H, last = math.prod(self.sizes[n] for n in self.heads), x.shape[-2:]
        whole = x.reshape(*[1] * (len(self.sizes) + 2 - x.dim()), *x.shape)
        return whole.expand(*self.sizes, *last).permute(*self.order, -2, -1).reshape(-1, H, *last)

    def back(self, x: Tensor) -> Tensor:
        """Undo `by_head`."""
        parts = x.reshape(*(self.sizes[n] for n in self.order), *x.shape[-2:])
        return parts.permute(*(self.order.index(n) for n in range(len(self.sizes))), -2, -1)


def leading(made: Sequence[Tensor], leaves: Leaves) -> Leading:
    """Return which leading dimensions of queries, keys and values, (*lead, T, K), are those of heads.

    Heads are made by other rows of linear modules, and examples or windows by the same rows at other positions. If
    nothing tells, the last dimension is that of heads.
    """
    try:
        sizes = tuple(torch.broadcast_shapes(*(x.shape[:-2] for x in made)))
    except RuntimeError:  # of keys that the fused function repeats
        return Leading(tuple(made[0].shape[:-2]), (made[0].dim() - 3,))
    several = [n for n, size in enumerate(sizes) if size > 1]
    if len(sizes) == 1 and several:  # where windows and heads may share the dimension
        return Leading(sizes, (0,))
    if len(sizes) > 1:
        several = [n for n in several if any(_differ(x, n - len(sizes) - 2, leaves) for x in made)]
    return Leading(sizes, tuple(several) or (len(sizes) - 1,))


def folded(made: Sequence[Tensor], leaves: Leaves) -> tuple[int, int] | None:
    """Return how windows and heads share the one leading dimension of queries, keys and values, (W·H, T, K): as (W, H)
    or (H, W), whichever makes the later one run faster; None if all of it are heads."""
    for x in made:
        rows = [rows_read(each, leaves) for each in x] if x.requires_grad else []
        n = len(rows)
        if not any(rows) or (again := next((i for i in range(1, n) if rows[i] == rows[0]), n)) == n:
            continue
        step = again if again > 1 else next((i for i in range(n) if rows[i] != rows[0]), n)
        if n % step == 0 and step < n:
            return n // step, step
    return None


def _differ(x: Tensor, dim: int, leaves: Leaves) -> bool:
    """Return whether two parts of a tensor along a dimension, counted from the last, are made by different rows of
    linear modules."""
    if -dim > x.dim() or x.shape[dim] < 2 or not x.requires_grad:
        return False
    one, other = (rows_read(x.select(dim, n), leaves) for n in (0, 1))
    return one != other
