"""The facts that discovery sees of one call of attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.discovery.per_head_tensors import is_sum
from mhaprune.hooks.blocks import Rows
from mhaprune.hooks.pytree import is_linear

UNREAD = "no linear module that is called reads what its heads say"
SUM = "what reads its heads reads their sum with other states, so that no gate closes them alone (is there no W_O?)"
MIXED = (
    "its heads are mixed before the first linear module that reads them, so they cannot be gated one by one (a norm"
    " over all heads, or a W_O that is no linear module?)"
)
NO_GRAD = "runs without gradients (no_grad, or checkpointing, which must be off)"
INFERENCE = (
    "runs under torch.inference_mode, in which nothing can be traced; if that is a decorator, take it away first:"
    " model.forward = type(model).forward.__wrapped__.__get__(model)"
)


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
    inputs: list[tuple[int | str, int]] = field(default_factory=list)
    """See `Block.inputs`."""
    inner: Tensor | None = None
    """The factor of each head in its values or weights, (H,), see `inner_factor`."""
    factor: Tensor | None = None
    """The factor of each head on its way to W_O, (H,), if it is one number in all places."""
    weighs_again: bool = False
    """True if its attention weights weigh other values too."""
    gated: bool = False
    """True if the layer has learned the factor."""
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
    return reached is not None and not is_sum(heads, found.context, constant=False)
