"""The facts that discovery sees of one call of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.discovery.layouts import Leaves, drawn, rows_of_heads, rows_read
from mhaprune.discovery.per_head_tensors import is_sum
from mhaprune.hooks.blocks import ROLES, Rows, within
from mhaprune.hooks.pytree import is_linear

UNREAD = "no linear module that is called reads what its heads say"
SUM = "what reads its heads reads their sum with other states, so that no gate closes them alone (is there no W_O?)"
CALLED_FOR_OTHERS = "its W_O, {}, is called for other states too, which a gate of a head would close with it"
MIXED = (
    "its heads are mixed before the first linear module that reads them, so they cannot be gated one by one (a norm"
    " over all heads, or a W_O that is no linear module?)"
)
NO_GRAD = "runs without gradients (no_grad, or checkpointing, which must be off)"
INFERENCE = (
    "runs under torch.inference_mode, in which nothing can be traced; if that is a decorator, take it away first:"
    " model.forward = type(model).forward.__wrapped__.__get__(model)"
)


Paths = Mapping[nn.Module, str]


@dataclass(eq=False)
class Found:
    """Facts about one attention call that discovery has seen."""

    module: nn.Module
    heads: int
    of_kv: tuple[int, ...]
    rows: dict[str, Rows | str] = field(default_factory=dict)
    """The rows of the linear modules that make each head's query, key and value, by these names; or a text that says
    why they were not found."""
    context: Tensor | None = None
    """The heads' outputs as a leaf, (B, H, T, K), or (B, T, H, K) if `heads_last`."""
    heads_last: bool = False
    out: nn.Module | None = None
    also: dict[nn.Module, None] = field(default_factory=dict)
    """More maps that read the heads, see `Block.also`."""
    read: Tensor | None = None
    """The input of W_O."""
    columns: tuple[tuple[int, ...], ...] = ()
    scored_by: set[str] = field(default_factory=set)
    """The paths of the linear modules that its attention weights, or what is added to its scores, are made by."""
    cross: bool = False
    numbers: list[tuple[str, int]] = field(default_factory=list)
    """See `Block.numbers`."""
    numbers_of_keys: list[tuple[str, int]] = field(default_factory=list)
    """See `Block.numbers_of_keys`."""
    inputs: list[tuple[int | str, int]] = field(default_factory=list)
    """See `Block.inputs`."""
    computed: list[Tensor] = field(default_factory=list)
    """What a call that has one head computes, all (B, 1, T, K): a loop may have more such calls."""
    inner: Tensor | None = None
    """The factor of each head in its values or weights, (H,), see `inner_factor`."""
    factor: Tensor | None = None
    """The factor of each head on its way to W_O, (H,), if it is one number in all places."""
    weighs_again: bool = False
    """True if its attention weights weigh other values too."""
    gated: bool = False
    """True if the layer has learned the factor."""
    of_parts: bool = False
    """True if several calls say parts of its heads, which are added."""
    part: bool = False
    """True if it is one of these, but the first."""
    beside: bool = False
    """True if its W_O reads the heads of an earlier call of attention at the same time."""
    bent: bool = False
    """True if a norm or an activation is between the heads and W_O, which may read their sum with other states."""
    unusable: str = UNREAD
    """The reason why its heads cannot be gated one by one; empty if they can."""


def reads_elsewhere(found: Found, x: Any) -> bool:
    """Return whether the input of another linear module than W_O comes from the heads, but from other positions, as
    in joint attention of two streams."""
    if found.read is None or found.context is None or not isinstance(x, Tensor) or not x.requires_grad:
        return False
    if not is_linear(found.out) or x.device != found.read.device:  # else what it says is no leaf
        return False
    if x.shape[-1] != found.read.shape[-1] or (x.shape == found.read.shape and torch.equal(x, found.read)):
        return False
    (reached,) = torch.autograd.grad(x.sum(), found.context, retain_graph=True, allow_unused=True)
    heads = x[..., [*chain(*found.columns)]]
    return reached is not None and not is_sum(heads, [found.context], constant=False)


def of_heads_alone(x: Any, found: Sequence[Found], states: Sequence[Tensor], leaves: Leaves, paths: Paths) -> bool:
    """Return whether the input x of a linear module, (*lead, W), is at all positions what these heads say, or a
    constant, which is made of no `states` of the model, or made of values of the heads."""
    contexts = [each.context for each in found if each.context is not None]
    if not contexts or not isinstance(x, Tensor) or not x.requires_grad:
        return False
    u = torch.ones_like(x, requires_grad=True)
    slopes = torch.autograd.grad(x, contexts, u, create_graph=True, allow_unused=True)
    moved = [(slope * drawn(c)).sum() for slope, c in zip(slopes, contexts, strict=True) if slope is not None]
    if not moved:
        return False
    (change,) = torch.autograd.grad(torch.stack(moved).sum(), u, retain_graph=True)  # of x, if all heads change
    others = x[x.detach().any(dim=-1) & ~change.any(dim=-1)]
    alone = not made_of(others, states)
    return alone or any(each.columns and own_part(each, others[None], leaves, paths) for each in found)


def made_of(x: Tensor, states: Sequence[Tensor]) -> bool:
    """Return whether x depends on some of these states."""
    number = (x * (drawn(x) + 0.5)).sum()  # without weights, parts could cancel
    followed = [state for state in states if state.requires_grad]  # others are of a part without gradients
    if not x.requires_grad or not followed:
        return False
    read = torch.autograd.grad(number, followed, retain_graph=True, allow_unused=True)
    return any(each is not None and bool(each.any()) for each in read)


def own_part(found: Found, x: Tensor, leaves: Leaves, paths: Paths) -> bool:
    """Return whether what is added to the heads is theirs, part by part: made by their own queries, keys or values, by
    others that their weights weigh too, or by a convolution of the layer that reads each channel alone, as of the
    values."""
    made, _ = rows_of_heads(torch.stack([x[..., list(each)] for each in found.columns], 1), leaves, paths)
    modules: dict[str, Any] = {paths[module]: module for module, _ in leaves}
    own: dict[str, set[int]] = {}
    for name, rows in found.rows.items():
        if isinstance(rows, Rows) and name.startswith(ROLES):
            own.setdefault(rows.path, set()).update(*rows.heads)
    return not isinstance(made, str) and all(
        own.get(rows.path, set()).issuperset(chain(*rows.heads))
        or (
            (
                found.weighs_again
                or getattr(modules[rows.path], "groups", 1) == getattr(modules[rows.path], "out_channels", 0)
            )
            and within(rows.path, paths[found.module])
        )
        for rows in made
    )


def weighs_in(found: Found, x: Tensor, leaves: Leaves, paths: Paths) -> bool:
    """Return whether a tensor is made by the queries or keys of these heads, and not by their outputs alone."""
    own = {
        (rows.path, row)
        for name in ROLES[:2]
        if isinstance(rows := found.rows.get(name), Rows)
        for each in rows.heads
        for row in each
    }
    read = rows_read(x, leaves).items() if own and x.requires_grad else ()
    return any((paths[leaves[n][0]], row) in own for n, rows in read for row in rows)


def unusable(columns: Sequence[Sequence[int]]) -> str:
    """Return the reason why heads that W_O reads by these columns cannot be gated one by one; empty if they can."""
    if not any(columns):
        return "no input of W_O changes with its heads here, as behind an activation that is flat"
    if len({column for of_head in columns for column in of_head}) != sum(map(len, columns)):
        return MIXED
    return "W_O reads unequal numbers of columns of its heads" if len({*map(len, columns)}) > 1 else ""


def completed(found: Sequence[Found], earlier: Sequence[Found]) -> None:
    """Add the rows and tensors of heads that only an `earlier` trace of the same calls has shown, with other numbers:
    those of this trace may be too large for a softmax to have a gradient."""
    if [each.module for each in found] != [each.module for each in earlier]:
        return
    for now, before in zip(found, earlier, strict=True):
        known = {*ROLES, *now.rows, *(rows.path for rows in now.rows.values() if isinstance(rows, Rows))}
        for name, rows in before.rows.items():
            if isinstance(rows, Rows) and known.isdisjoint((name, rows.path)):
                now.rows[name] = rows
        for last, first in ((now.numbers, before.numbers), (now.numbers_of_keys, before.numbers_of_keys)):
            last += [each for each in first if each[0] not in dict(last)]
