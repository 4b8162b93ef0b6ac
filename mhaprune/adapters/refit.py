"""Fit what is left of a model that others made to what the whole model computes, in closed form.

Dimensions: B = batch, T = tokens, W = inputs of a map, D = outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mhaprune.adapters.batches import Batches
from mhaprune.adapters.blocks import AttentionBlock, is_linear, weight_of
from mhaprune.adapters.gating import at_rest
from mhaprune.measure import Diverged
from mhaprune.recoveries.least_squares import correct

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""A map of a large model may have more inputs than a few hundred examples have tokens. So the ridge is chosen for each
map, on examples that are not fitted to."""
PARTS = 10
"""The smallest number of batches, so that a few are left to choose the ridge by."""
LOOKED_AT = 12
"""Inputs of modules that are looked at for the sum of a map's output and a residual stream."""
NO_READERS = (nn.Dropout, nn.Identity)


class Runs(Protocol):
    """What is needed of a wrapped model here; `wrapped.py` says what it means."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def blocks(self) -> Sequence[AttentionBlock]: ...

    @property
    def run(self) -> Callable[[nn.Module, Any], Any]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def two_sided(self) -> bool: ...

    def run_gated(self, batch: Batches) -> Any: ...

    def changed(self, **parts: Any) -> Any: ...


Left = TypeVar("Left", bound=Runs)


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
    dense: Runs,
    left: Left,
    data: Batches,
    *,
    examples: int = 1024,
    batch_size: int = 32,
    ridge: float | Sequence[float] = RIDGES,
    feed_forward: bool = True,
) -> Left:
    """A copy of `left` whose residual stream follows that of `dense`; see `recoveries.refit` for the formula.

    The output projection of every attention is fitted anew and, if `feed_forward`, the last map of every other sublayer
    that adds to the residual stream. No label is read. Several ridges compete, see `correct`. It takes one pass of the
    whole model and, for each map, half a pass of the smaller one on average. The streams of all maps are held in
    memory.

    Raises `Diverged` where a number is not finite.
    """
    data = data[:examples].converted(left.device, left.dtype)
    batches = list(data.batches(max(1, min(batch_size, len(data) // PARTS))))
    model: Left = left.changed(model=copy.deepcopy(left.model))
    columns = {block.out: block.order for block in left.blocks}
    maps = [each for each in find_maps(dense, data[:1]) if each.path in columns or (feed_forward and each.reader)]
    wanted = [_streams(dense, maps, batch) for batch in batches]
    for i, each in enumerate(tqdm(maps, "refit", disable=None, leave=False)):
        last: Any = model.model.get_submodule(each.path)
        weight = weight_of(last)
        chosen = columns.get(each.path, torch.arange(weight.shape[1])).to(weight.device)
        parts = []
        for batch, streams in zip(batches, wanted, strict=True):
            ((inputs, there),) = _streams(model, [each], batch)
            valid = _valid(left, each.path, batch, there)
            missing = (streams[i][1] - there)[valid]
            if not missing.isfinite().all():
                raise Diverged(f"the states after {each.path} are not finite")
            parts.append((inputs.reshape(*valid.shape, -1)[valid][:, chosen], missing))
        fitted = weight[:, chosen]
        correct(fitted, last.bias, parts, ridge)
        weight[:, chosen] = fitted
    return model


def find_maps(subject: Runs, batch: Batches) -> list[Map]:
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


def _streams(subject: Runs, maps: Sequence[Map], batch: Batches) -> list[tuple[Tensor, Tensor]]:
    """For each map what it reads in a pass over a batch, and what stands in the residual stream after it. The pass ends
    when all of that is known."""
    inputs: dict[Map, Tensor] = {}
    found: dict[Map, Tensor] = {}
    calls: dict[str, int] = {}

    def note(each: Map, stream: Tensor) -> None:
        found[each] = stream
        if len(found) == len(maps):
            raise _Enough

    def of_map(each: Map) -> Callable[..., None]:
        def hook(module: nn.Module, read: tuple[Any, ...], output: Tensor) -> None:
            inputs[each] = read[0]
            if each.reader is None:
                note(each, output)

        return hook

    def of_reader(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, read: tuple[Any, ...]) -> None:
            call = calls[path] = calls.get(path, -1) + 1
            for each in maps:
                if (each.reader, each.call) == (path, call):
                    note(each, read[0])

        return hook

    with ExitStack() as stack:
        for each in maps:
            stack.callback(subject.model.get_submodule(each.path).register_forward_hook(of_map(each)).remove)
        for path in {each.reader for each in maps if each.reader is not None}:
            stack.callback(subject.model.get_submodule(path).register_forward_pre_hook(of_reader(path)).remove)
        with suppress(_Enough):
            subject.run_gated(batch)
    return [(inputs[each], found[each]) for each in maps]


def _valid(subject: Runs, path: str, batch: Batches, stream: Tensor) -> Tensor:
    """The real positions of a residual stream, in its shape."""
    valid_BT = batch.valid(stream[..., 0].numel() // len(batch), subject.two_sided and "decoder" in path)
    return valid_BT.reshape(stream.shape[:-1])
