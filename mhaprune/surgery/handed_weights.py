"""Call the linear modules whose weights a layer hands to functions, so that hooks on them see what they read.

Such are `F.linear(x, self.proj.weight)`, `x @ self.proj.weight.T`, and `F.multi_head_attention_forward`, which is
computed here step by step and so runs with any number of heads.

Dimensions: B = batch, T = queries, U = keys, H = heads, K = head_dim, E = width of the model.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhaprune.hooks.attention_calls import AttentionCalls
from mhaprune.hooks.eval_mode import ModelCall
from mhaprune.hooks.functional_linear import WeightsInUse, calls_begun
from mhaprune.hooks.products import WeightProduct, places_of
from mhaprune.surgery.reshaping import surround

ATTRIBUTES = ("called_maps", "width_of_heads")
"""The attributes of a layer whose linear modules are called: their places in `layer.modules()`, and K where it calls
`F.multi_head_attention_forward`, or else 0."""


class _Handed(TorchFunctionMode):
    """A mode of torch that notes what layers hand to functions. `running` are the modules whose calls have begun."""

    def __init__(self, running: Sequence[nn.Module]) -> None:
        super().__init__()
        self.running = running
        self.maps: dict[nn.Module, dict[nn.Module, None]] = {}
        self.widths: dict[nn.Module, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward and self.running:
            given, layer = _arguments(args, kwargs or {}), self.running[-1]
            self.widths[layer] = given["embed_dim_to_check"] // given["num_heads"]
            handed = {id(each) for each in given.values() if isinstance(each, Tensor)}
            parts = [part for part in layer.modules() if isinstance(part, nn.Linear) and id(part.weight) in handed]
            self.maps.setdefault(layer, {}).update(dict.fromkeys(parts))
        return func(*args, **(kwargs or {}))

    def handed(self, module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
        for layer in self.running[-1:]:
            if any(part is module for part in layer.modules()):
                self.maps.setdefault(layer, {})[module] = None
        return output

    def attends(self, attend: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Any:
        for layer in self.running[-1:]:
            self.widths.setdefault(layer, 0)
        return attend(query, key, value)


def with_called_maps(call: ModelCall) -> nn.Module:
    """Return a copy that shares all weights, in which layers of attention call the linear modules whose weights they
    hand to functions; or the model itself, if none of them hands any."""
    model = call.model
    with call.at_rest(), calls_begun(model) as running, ExitStack() as stack:
        noted = _Handed(running)
        stack.enter_context(WeightsInUse(model.modules(), running, noted.handed))
        stack.enter_context(noted)
        stack.enter_context(AttentionCalls(noted.attends))
        with suppress(Exception):  # of a model that may be anybody's; the passes that need an output name it
            call()
    paths = {module: path for path, module in model.named_modules()}
    found = [layer for layer, width in noted.widths.items() if width or noted.maps.get(layer)]
    if not found:
        return model
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for layer in found:
        parts = [*layer.modules()]
        numbers = sorted(map(parts.index, noted.maps.get(layer, ())))
        call_maps(twin, paths[layer], dict(zip(ATTRIBUTES, (numbers, noted.widths[layer]), strict=True)))
    return twin


def call_maps(model: nn.Module, path: str, attributes: Mapping[str, Any]) -> None:
    """Make the layer at `path` call its maps, in place, if these attributes say so and it does not yet."""
    layer: Any = model.get_submodule(path)
    if "called_maps" in attributes and not any(part is forward_with_called_maps for part in _around(layer)):
        vars(layer).update({name: attributes[name] for name in ATTRIBUTES})
        surround(layer, forward_with_called_maps)


def _around(layer: Any) -> Iterator[Any]:
    """Yield the functions that are around the forward of a layer, see `surround`."""
    inner = vars(layer).get("forward")
    while isinstance(inner, partial):
        yield inner.func
        inner = inner.args[1]


def forward_with_called_maps(layer: Any, inner: Any, *arguments: Any, **named: Any) -> Any:
    """Call a layer in the mode `CalledMaps`."""
    with CalledMaps(layer):
        return inner(*arguments, **named)


class CalledMaps(TorchFunctionMode):
    """A mode of torch in which a function that is handed the weight of a linear module calls the module instead."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        parts = [*layer.modules()]
        self.maps = places_of(parts[n] for n in layer.called_maps)
        self.width = layer.width_of_heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and self.width:
            given = _arguments(args, kwargs)
            more = ("bias_k", "bias_v", "static_k", "static_v")
            if not given["add_zero_attn"] and all(given[name] is None for name in more):
                return self.attention(given)
        for product in WeightProduct.of(func, args, kwargs):
            if module := product.module_of(self.maps):
                own, bias = module.bias, product.bias
                if own is not None and bias is not None and (bias is own or torch.equal(bias, own)):
                    return product.by(module)
                said = product.by(partial(_without_bias, module))
                return said if bias is None else said + bias
        return func(*args, **kwargs)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `F.linear` by the linear module that has this weight, if there is one."""
        out: Tensor = self.__torch_function__(F.linear, (), (x, weight, bias))
        return out

    def attention(self, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Compute `F.multi_head_attention_forward` with as many heads as the weights have. States are (T, B, E)."""
        inputs = [given[name] for name in ("query", "key", "value")]
        batched = inputs[0].dim() == 3
        inputs = inputs if batched else [x.unsqueeze(1) for x in inputs]
        q, k, v = (
            x.unflatten(-1, (-1, self.width)).permute(1, 2, 0, 3)  # (B, H, T, K)
            for x in self.projected(inputs, given)
        )
        mask = _joint_mask(given["attn_mask"], given["key_padding_mask"], q, k)
        p = given["dropout_p"] if given["training"] else 0.0
        weights = None
        if given["need_weights"]:
            scores = q / q.shape[-1] ** 0.5 @ k.mT
            weights = (scores if mask is None else scores + mask).softmax(dim=-1)
            context = F.dropout(weights, p) @ v
            weights = weights.mean(dim=1) if given["average_attn_weights"] else weights
        else:
            causal = given["is_causal"] and mask is None
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal)
        out = self.linear(context.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"])
        return (out, weights) if batched else (out.squeeze(1), None if weights is None else weights.squeeze(0))

    def projected(self, inputs: Sequence[Tensor], given: dict[str, Any]) -> Sequence[Tensor]:
        """Return queries, keys and values, (T, B, H·K)."""
        weight, bias = given["in_proj_weight"], given["in_proj_bias"]
        if not given["use_separate_proj_weight"] and inputs[0] is inputs[1] is inputs[2]:
            return self.linear(inputs[0], weight, bias).chunk(3, dim=-1)
        apart = [given[f"{name}_proj_weight"] for name in "qkv"]
        weights = apart if given["use_separate_proj_weight"] else weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.split([len(each) for each in weights])
        return [self.linear(*each) for each in zip(inputs, weights, biases, strict=True)]


def _without_bias(module: nn.Linear, x: Tensor) -> Tensor:
    """Call a linear module, and its hooks, whose bias the layer adds itself, or not at all."""
    bias, module._parameters["bias"] = module._parameters["bias"], None
    try:
        out: Tensor = module(x)
        return out
    finally:
        module._parameters["bias"] = bias


def _arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def _joint_mask(mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the two masks of torch, True or -inf at what is not seen, as one that is added, (B, H, T, U) or less."""
    (B, _, T, _), U = query.shape, key.shape[2]
    parts = []
    if mask is not None:
        parts.append(mask.view(B, -1, T, U) if mask.dim() == 3 else mask)
    if padding is not None:
        parts.append(padding.view(B, 1, 1, U))
    added = [
        torch.zeros_like(part, dtype=query.dtype).masked_fill(part, -torch.inf) if part.dtype == torch.bool else part
        for part in parts
    ]
    return None if not added else added[0] if len(added) == 1 else added[0] + added[1]
