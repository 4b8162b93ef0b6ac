"""A second device for machines that have one: its tensors lie in the memory of the CPU. An operation on tensors of two
devices is an error, as it is between two GPUs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

ACROSS = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
"""The operations that may read one device and write to the other."""


class OnSecond(Tensor):
    """A tensor on the second device; `held` is its content."""

    held: Tensor

    def __new__(cls, held: Tensor) -> "OnSecond":
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made: OnSecond = Tensor._make_wrapper_subclass(cls, held.shape, device="second:0", **layout)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with TwoDevices():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin: Tensor = OnSecond(self.detach().held.clone())
        memo[id(self)] = nn.Parameter(twin, self.requires_grad) if isinstance(self, nn.Parameter) else twin
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.detach().held.tolist()

    def data_ptr(self) -> int:
        return self.detach().held.data_ptr()


class TwoDevices(TorchDispatchMode):
    """While the context lasts, there is a device `second:0`, and devices are not mixed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on = {each.device.type for each in given if each.dim()} or {each.device.type for each in given}
        if len(on) > 1 and func not in ACROSS:
            raise RuntimeError(f"{func}: tensors on {' and '.join(sorted(on))}")
        wanted = (kwargs or {}).get("device")
        place = next(iter(on), "cpu") if wanted is None else torch.device(wanted).type
        named = {key: torch.device("cpu") if key == "device" else each for key, each in (kwargs or {}).items()}
        output = func(*tree.tree_map(_held, args), **tree.tree_map(_held, named))
        if any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.returns):
            return args[0]
        return (
            output if place == "cpu" else tree.tree_map(lambda x: OnSecond(x) if isinstance(x, Tensor) else x, output)
        )


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnSecond) else value


def _empty(size: Any, *stride: Any, dtype: Any = None, **rest: Any) -> Tensor:
    return OnSecond(torch.empty_strided(size, *stride, dtype=dtype) if stride else torch.empty(size, dtype=dtype))


def _copy(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    _held(to).copy_(_held(source))
    return to


@pytest.fixture(scope="session")
def second_device() -> torch.device:
    """The second device, for use within `TwoDevices`."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices in Python")
    backend_registration._setup_privateuseone_for_python_backend("second")
    _LIBRARY.impl("empty_strided", _empty, "PrivateUse1")
    _LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
    _LIBRARY.impl("_copy_from", _copy, "PrivateUse1")
    return torch.device("second:0")


_LIBRARY = torch.library.Library("aten", "IMPL")
