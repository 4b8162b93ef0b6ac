"""Fit what is left of a model that others made to what the whole model computes, in closed form.

Dimensions: B = batch, T = tokens, W = inputs of a map, D = outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mhaprune.adapters.batches import Batches
from mhaprune.adapters.blocks import is_linear, weight_of
from mhaprune.adapters.gating import at_rest
from mhaprune.adapters.wrapped import WrappedModel
from mhaprune.measure import Diverged
from mhaprune.recoveries.least_squares import correct

LOOKED_AT = 12
"""Inputs of modules that are looked at for the sum of a map's output and a residual stream."""
NO_READERS = (nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class Map:
    """A linear map that ends a sublayer, and the first module that reads what it adds to the residual stream."""

    path: str
    reader: str | None
    """None where nothing is added: then the map is fitted to its own output."""
    call: int = 0
    """Which call of the reader that is."""


@torch.no_grad()
def refit(
    dense: WrappedModel,
    left: WrappedModel,
    data: Batches,
    *,
    examples: int = 512,
    batch_size: int = 64,
    ridge: float = 1e-3,
    feed_forward: bool = True,
) -> WrappedModel:
    """A copy of `left` whose residual stream follows that of `dense`; see `recoveries.refit` for the formula.

    The output projection of every attention is fitted anew and, if `feed_forward`, the last map of every other sublayer
    that adds to the residual stream. No label is read. Each map takes half a pass of both models, on average.

    Raises `Diverged` where a number is not finite.
    """
    data = data[:examples].converted(left.device, left.dtype)
    model = replace(left, model=copy.deepcopy(left.model))
    columns = {block.out: block.order for block in left.blocks}
    maps = [each for each in find_maps(dense, data[:1]) if each.path in columns or (feed_forward and each.reader)]
    for each in tqdm(maps, "refit", disable=None, leave=False):
        last: Any = model.model.get_submodule(each.path)
        weight = weight_of(last)
        chosen = columns[each.path] if each.path in columns else torch.arange(weight.shape[1])
        fitted = weight[:, chosen.to(weight.device)]

        def parts(each: Map = each, chosen: Tensor = chosen) -> Iterator[tuple[Tensor, Tensor]]:
            for batch in data.batches(batch_size):
                _, wanted = _until(dense, each, batch)
                inputs, there = _until(model, each, batch)
                valid = _valid(left, each.path, batch, there)
                missing = (wanted - there)[valid]
                if not missing.isfinite().all():
                    raise Diverged(f"the states after {each.path} are not finite")
                yield inputs.reshape(*valid.shape, -1)[valid][:, chosen.to(inputs.device)], missing

        correct(fitted, last.bias, parts(), ridge)
        weight[:, chosen.to(weight.device)] = fitted
    return model


def find_maps(subject: WrappedModel, batch: Batches) -> list[Map]:
    """The maps in the order of their calls, found by running a batch: the output projections of the attention, and
    every linear module whose output is added to something before it is read."""
    model = subject.model
    paths = {module: path for path, module in model.named_modules()}
    outs = {block.out for block in subject.blocks}
    pending: list[tuple[str, Tensor, list[int]]] = []
    calls: dict[nn.Module, int] = {}
    order: dict[str, Map | None] = {}

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        calls[module] = calls.get(module, -1) + 1
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or not x.requires_grad or isinstance(module, NO_READERS):
            return
        for entry in list(pending):
            path, leaf, looks = entry
            if leaf.shape != x.shape:
                continue
            looks[0] += 1
            (gradient,) = torch.autograd.grad(x.sum(), leaf, retain_graph=True, allow_unused=True)
            added = gradient is not None and bool((gradient == 1).all()) and not torch.equal(x, leaf)
            if added:
                order[path] = Map(path, paths[module], calls[module])
            if added or looks[0] == LOOKED_AT:
                pending.remove(entry)

    def leave(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        order.setdefault(paths[module], None)
        pending.append((paths[module], leaf, [0]))
        return leaf.clone()

    with at_rest(model), torch.enable_grad(), ExitStack() as stack:
        for module in model.modules():
            if module is not model:
                stack.callback(module.register_forward_pre_hook(enter).remove)
            if is_linear(module):
                stack.callback(module.register_forward_hook(leave).remove)
        subject.run(model, batch.converted(subject.device, subject.dtype).arguments())
    return [found or Map(path, None) for path, found in order.items() if found is not None or path in outs]


class _Enough(Exception):
    """Ends a pass."""


def _until(subject: WrappedModel, each: Map, batch: Batches) -> tuple[Tensor, Tensor]:
    """What a map reads in a pass over a batch, and what stands in the residual stream after it. The pass ends there."""
    got: list[Tensor] = []
    counted = 0

    def of_map(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        got[:] = [inputs[0], output]
        if each.reader is None:
            raise _Enough

    def of_reader(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal counted
        counted += 1
        if counted > each.call:
            got[1] = inputs[0]
            raise _Enough

    with _stopping(subject.model.get_submodule(each.path).register_forward_hook(of_map)), ExitStack() as stack:
        if each.reader is not None:
            reader = subject.model.get_submodule(each.reader)
            stack.callback(reader.register_forward_pre_hook(of_reader).remove)
        subject.run_gated(batch)
    inputs, stream = got
    return inputs, stream


@contextmanager
def _stopping(handle: Any) -> Iterator[None]:
    try:
        yield
    except _Enough:
        pass
    finally:
        handle.remove()


def _valid(subject: WrappedModel, path: str, batch: Batches, stream: Tensor) -> Tensor:
    """The real positions of a residual stream, in its shape."""
    valid_BT = batch.valid(stream[..., 0].numel() // len(batch), subject.two_sided and "decoder" in path)
    return valid_BT.reshape(stream.shape[:-1])
