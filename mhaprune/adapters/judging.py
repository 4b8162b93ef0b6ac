"""What a model that others made is judged by, and what it said as plain numbers.

Dimensions: B = batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhaprune.adapters.batches import MASK, Batches

PerExample = Callable[[Any, Any], Tensor]
"""From what the model returns and a batch to one number per example, (B,)."""


class Judged(NamedTuple):
    """A loss and a quality per example, (B,) each."""

    loss: Tensor
    quality: Tensor


def judged(output: Any, given: Any, size: int, loss: PerExample, quality: PerExample) -> Judged:
    """The loss and the quality of every example of a batch of that size, in the user's form.

    Raises ValueError for a loss or a quality that is not one real number per example.
    """
    found: list[Tensor] = []
    for name, judge in (("loss", loss), ("quality", quality)):
        values = judge(output, given)
        if not isinstance(values, Tensor) or values.shape != (size,):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"{name}: returns {shape} for a batch of {size}, must be one number per example, ({size},); a mean over"
                f" the batch cannot say how sure it is"
            )
        if name == "loss" and not values.is_floating_point():
            raise ValueError(f"loss: returns {values.dtype}, must be real numbers, such as torch.float32")
        found.append(values.to(found[0].dtype if found else values.dtype))
    return Judged(*found)


def flat(output: Any, batch: Batches) -> Tensor:
    """All real numbers in what a model returned, as one row; of tensors with a position per token, the real ones."""
    mask, parts = batch.fields.get(MASK), []
    for value in tensors_in(output):
        if value.is_floating_point():
            by_token = mask is not None and value.dim() == 3 and mask.shape == value.shape[:2]
            parts.append(value[mask != 0].flatten() if by_token else value.flatten())
    return torch.cat(parts) if parts else torch.zeros(0)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in it, in its order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
