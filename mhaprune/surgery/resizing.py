"""Keep some outputs and inputs of a linear module."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mhaprune.hooks.blocks import weight_of
from mhaprune.hooks.pytree import is_convolution, is_linear
from mhaprune.surgery.reshaping import store


def resize(module: Any, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None) -> None:
    """Keep only these outputs and inputs of a linear module, in place."""
    weight, bias = weight_of(module).detach(), None if module.bias is None else module.bias.detach()
    if rows is not None:
        index = torch.tensor(rows, dtype=torch.long, device=weight.device)
        weight, bias = weight[index], None if bias is None else bias[index]
    if columns is not None:
        weight = weight.index_select(1, torch.tensor(columns, dtype=torch.long, device=weight.device))
    as_stored = weight if isinstance(module, nn.Linear) else weight.mT
    if is_convolution(module):
        as_stored = weight.unflatten(1, (-1, *module.kernel_size))
    store(module, as_stored.contiguous(), bias)


def has_sizes(module: nn.Module) -> bool:
    """Return whether a module of torch with tensors for each head has attributes that count them, such as a norm."""
    return type(module).__module__.startswith("torch.nn") and not is_linear(module)
