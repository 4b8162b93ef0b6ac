"""The values that hooks see: tensors in nested values, and the linear modules that make them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def is_linear(module: Any) -> bool:
    """Return whether a module is one linear map at all positions: that of torch, GPT-2's `Conv1D`, whose weight is
    transposed, or a 1×1 convolution."""
    at_one_place = is_convolution(module) and {*module.kernel_size, *module.stride} == {1}
    at_one_place = at_one_place and (isinstance(module.padding, str) or not any(module.padding))
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" or at_one_place


def is_convolution(module: Any) -> bool:
    """Return whether a module is a convolution in which each output feature has weights of its own."""
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1


def features_dim(module: Any) -> int:
    """Return the dimension of the features in what a linear module or a convolution reads, counted from the last, which
    is -1."""
    return -1 - len(module.kernel_size) if is_convolution(module) else -1


def precise(values: Tensor) -> Tensor:
    """Return real numbers in float32 at least: in half precision, a difference of two losses is mostly rounding."""
    return values.float() if values.is_floating_point() and values.dtype.itemsize < 4 else values


def same_tensor(one: Any, other: Any) -> bool:
    """Return whether two values are tensors of one shape in one place of memory."""
    alike = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
    return alike and one.data_ptr() == other.data_ptr()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested mappings, lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def of_equal_sizes(one: Any, other: Any) -> tuple[Any, Any]:
    """Return the tensors in two outputs of a model that have the same size in both: attention weights have another one
    where heads are gone. Outputs of which none has are returned as they are."""
    pairs = [*zip(tensors_in(one), tensors_in(other), strict=False)]
    alike = [pair for pair in pairs if pair[0].shape == pair[1].shape]
    return (one, other) if len(alike) in (0, len(pairs)) else ([a for a, _ in alike], [b for _, b in alike])


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested mappings, lists and tuples with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed: Any = copy.copy(value)  # a dict of its own kind, as outputs of transformers are
        for key, each in value.items():
            changed[key] = mapped(each, change)
        return changed
    if isinstance(value, tuple | list):
        parts = [mapped(each, change) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
