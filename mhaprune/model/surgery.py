"""Copies of a network: the same one, or one with fewer heads.

Removing heads makes the weights smaller; the function is that of the network with those heads masked.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from mhaprune.model.attention import MultiHeadAttention, Projection

Module = TypeVar("Module", bound=nn.Module)
Replace = Callable[[nn.Module], "nn.Module | None"]
EMPTY = {name: type(value) for name, value in vars(nn.Module()).items() if name != "training"}
"""What `nn.Module` itself stores, and of which type: tensors, children and hooks. A copy starts with these empty."""


@torch.no_grad()
def copied(module: Module, clone: Callable[[Tensor], Tensor] = Tensor.clone, replace: Replace | None = None) -> Module:
    """A copy of a module and its children that shares no storage with it; tensors that are one stay one.

    Each tensor is copied with `clone`. Where `replace` returns a module, that stands in the copy instead. Hooks and
    compiled code are left behind. No constructor of a layer runs, so this costs no random numbers and far less time
    than building the network again.
    """
    return _copied(module, clone, replace or (lambda child: None), {})


@torch.no_grad()
def remove_heads(layer: MultiHeadAttention, kept: Sequence[int]) -> MultiHeadAttention:
    """A new layer with only the heads `kept`, by their position in `layer`, any number of them.

    Rows of W_Q, W_K and W_V and *columns* of W_O go; W_O's bias stays, also when no head does. The learned gate and
    the mask are folded into W_O, so the new layer has no gate. Its output equals that of `layer` with the other
    heads' gates at 0.
    """
    smaller = _bare(layer)
    smaller.num_heads, smaller.gate = len(kept), None
    heads, width = torch.tensor(kept, dtype=torch.long, device=layer.head_mask.device), layer.head_dim
    rows = (heads[:, None] * width + torch.arange(width, device=heads.device)).flatten()
    smaller._buffers["head_mask"] = torch.ones_like(layer.head_mask[: len(kept)])
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(layer, name)
        bias = None if old.bias is None else old.bias.index_select(0, rows)
        smaller._modules[name] = _projection(old, old.weight.index_select(0, rows), bias)
    gated_DW, bias = layer.effective_output(), layer.out_proj.bias
    bias = None if bias is None else bias.clone()
    smaller._modules["out_proj"] = _projection(layer.out_proj, gated_DW.index_select(1, rows), bias)
    return smaller


def _copied(
    module: Module, clone: Callable[[Tensor], Tensor], replace: Replace, done: dict[nn.Parameter, nn.Parameter]
) -> Module:
    copy = _bare(module)
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter not in done:
            done[parameter] = nn.Parameter(clone(parameter.detach()), parameter.requires_grad)
        copy._parameters[name] = None if parameter is None else done[parameter]
    for name, buffer in module._buffers.items():
        copy._buffers[name] = None if buffer is None else clone(buffer)
    for name, child in module._modules.items():
        other = None if child is None else replace(child)
        copy._modules[name] = _copied(child, clone, replace, done) if child is not None and other is None else other
    return copy


def _bare(module: Module) -> Module:
    """A module with the plain attributes of another, and no tensors, children or hooks yet."""
    bare = type(module).__new__(type(module))
    # One by one: written into __dict__ at once they would be slower to look up in every later call.
    for name, value in module.__getstate__().items():
        object.__setattr__(bare, name, EMPTY[name]() if name in EMPTY else value)
    bare._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    return bare


def _projection(old: Projection, weight: Tensor, bias: Tensor | None) -> Projection:
    new = _bare(old)
    new.out_features, new.in_features = weight.shape
    new._parameters["weight"] = nn.Parameter(weight)
    new._parameters["bias"] = None if bias is None else nn.Parameter(bias)
    return new
