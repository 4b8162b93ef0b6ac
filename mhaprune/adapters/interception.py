"""Every call of attention passes through a function for as long as one wants to watch.

Two doors: `F.scaled_dot_product_attention`, through which most modules go, those of transformers too; and the attention
interface of transformers, which knows the module that calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Attend = Callable[[Tensor, Tensor, Tensor], Any]
"""What would have been called, with its other arguments already in it."""
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class FusedAttention(TorchFunctionMode):
    """Passes every call of `F.scaled_dot_product_attention` through a function of that call, query (B, H, T, K), key,
    value and the other arguments."""

    def __init__(self, through: Callable[[Attend, Tensor, Tensor, Tensor, dict[str, Any]], Any]) -> None:
        super().__init__()
        self.through = through

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = dict(zip(NAMES, args, strict=False)) | kwargs
        query, key, value = (given.pop(name) for name in NAMES[:3])
        return self.through(lambda q, k, v: func(q, k, v, **given), query, key, value, given)


@contextmanager
def attention_interface(through: Callable[[Attend, nn.Module, Tensor, Tensor, Tensor], Any]) -> Iterator[None]:
    """Every call of the attention interface of transformers goes through a function of that call, the module, query
    (B, H, T, K), key and value. No config is touched."""
    if "transformers" not in sys.modules:  # then the model is none of its own, and importing it takes seconds
        yield
        return
    from transformers import modeling_utils

    interface: Any = modeling_utils.AttentionInterface
    original = interface.get_interface

    def get_interface(self: Any, name: str, default: Any) -> Any:
        function = original(self, name, default)

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
                return function(module, q, k, v, *args, **kwargs)

            return through(run, module, query, key, value)

        return attend

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


@contextmanager
def attention_weights(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collects the weights (B, H, T, U) of the attention modules at these paths, as they are called.

    Those of the fused function are computed from its arguments, those of eager attention are what it returns.
    """
    found: dict[str, Tensor] = {}
    running: list[str] = []
    names = {model.get_submodule(path): path for path in paths}

    def of_fused(attend: Attend, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Any:
        if running and query.dim() == 4:
            found[running[-1]] = weights_of(query, key, options)
        return attend(query, key, value)

    def of_interface(attend: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Any:
        out, weights, *others = attend(query, key, value)
        if module in names and weights is not None:
            found[names[module]] = weights
        return (out, weights, *others)

    with ExitStack() as stack:
        for module, path in names.items():
            stack.callback(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)).remove)
            stack.callback(module.register_forward_hook(lambda *_: (running.pop(), None)[1]).remove)
        stack.enter_context(attention_interface(of_interface))
        stack.enter_context(FusedAttention(of_fused))
        yield found


def weights_of(query: Tensor, key: Tensor, options: Mapping[str, Any]) -> Tensor:
    """The weights (B, H, T, U) with which the fused function would read the values; 0 where nothing may be read."""
    T, U, scale = query.shape[-2], key.shape[-2], options.get("scale")
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = options.get("attn_mask")
    if options.get("is_causal"):
        mask = torch.ones(T, U, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1).nan_to_num(0.0)
