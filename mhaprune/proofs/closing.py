"""A closed block must leave nothing of its units: prove it, and gate the module around W_O if W_O is not all that reads
them, as with an adapter that is not merged.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.discovery.layouts import LORA
from mhaprune.discovery.neurons import name_neurons
from mhaprune.heads import BlockId
from mhaprune.hooks.attention_calls import AttentionCalls
from mhaprune.hooks.blocks import Block, Unsupported, within
from mhaprune.hooks.pytree import mapped, same_tensor, tensors_in
from mhaprune.measure.outcomes import all_open
from mhaprune.subjects.gated_model import GatedModel


def closed_whole(subject: Any, batch: Any) -> tuple[Any, tuple[str, ...], Any]:
    """Return the subject with its gates where they close all that reads the units, what is left out, because it reads
    the same neurons as another map, or because no gate closes its units, and what the model says of the batch. Raises
    `Unsupported`, which names the map, if nothing is left."""
    beside, output = _read_beside(subject, batch)
    leaks = {subject.by_name[name].out for name in beside if _leaks(subject, batch, name)}
    readers = Counter(source.rows for block in subject.blocks if block.kind == "neuron" for source in block.made_by)
    wrapped = leaks | {
        block.out for block in subject.blocks if any(readers[source.rows] > 1 for source in block.made_by)
    }
    if not wrapped:
        return subject, (), output
    outer = _around(subject, batch, wrapped)
    taken: dict[str, str] = {}
    left, out_of = [], list[str]()
    for name, block in subject.by_name.items():
        at = outer.get(block.out, "")
        if not at and any(readers[source.rows] > 1 for source in block.made_by):
            out_of.append(block.out)
            continue
        if any(place == at or within(block.out, place) for place in taken):
            continue  # an adapter, which the gate of the map that it adapts closes too
        taken |= {at: block.out} if at else {}
        left.append((name, replace(block, gate_at=at, why_not=_why_not(block, outer))))
    blocks = [block for _, block in left]
    names = [name for name, block in left if block.kind != "neuron"]
    names += name_neurons([block for block in blocks if block.kind == "neuron"])
    if not blocks:
        return subject, tuple(out_of), output
    subject = subject.changed(blocks=tuple(blocks), names=tuple(names))
    open_still = {name: block for name, block in subject.by_name.items() if leaks and _leaks(subject, batch, name)}
    if len(open_still) == len(subject.blocks):
        raise Unsupported(
            f"{blocks[0].out}: is not all that reads its units, so closing them leaves a part of what they say; gate"
            " what reads them, or merge it into this map first"
        )
    if open_still:
        kept = {name: block for name, block in subject.by_name.items() if name not in open_still}
        subject = subject.changed(blocks=tuple(kept.values()), names=tuple(kept))
        out_of += [block.path if block.kind == "head" else block.out for block in open_still.values()]
    return subject, tuple(out_of), output


@torch.enable_grad()
def _read_beside(subject: Any, batch: Any) -> tuple[list[BlockId], Any]:
    """Return the blocks from whose units outputs come by another way than through the maps that are gated, and the
    outputs. The graph of one pass tells; whether a way that it shows has an effect, only `_leaks` does."""
    maps: dict[str, set[Any]] = {path: set() for block in subject.blocks for path in block.outs}

    def passing(path: str) -> Any:
        def passed(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            if len([*tensors_in((inputs, named))]) == 1:
                maps[path].update(x.grad_fn for x in tensors_in(output))

        return passed

    with ExitStack() as stack:
        for path in maps:
            module = subject.module.get_submodule(path)
            stack.callback(module.register_forward_hook(passing(path), with_kwargs=True).remove)
        leaves = stack.enter_context(_with_zeros(subject))
        output = subject.run_gated(batch)
    ends: set[Any] = {x.grad_fn for x in tensors_in(output) if x.grad_fn is not None}
    above: dict[Any, list[Any]] = {}
    begins: dict[int, Any] = {}
    ahead = [*ends]
    while ahead:
        node = ahead.pop()
        begins[id(getattr(node, "variable", None))] = node
        for below in (below for below, _ in node.next_functions if below is not None):
            ahead += [below] * (below not in above)
            above.setdefault(below, []).append(node)
    beside = []
    for name, block in subject.by_name.items():
        alike = [each for each in subject.blocks if each is block or (block.flat and each.path == block.path)]
        own = set().union(*(maps[path] for each in alike for path in each.outs))
        ahead = [begins[id(leaf)] for leaf in _of_units(block, leaves) if id(leaf) in begins]
        seen = {*ahead}
        while ahead:
            if (node := ahead.pop()) in ends:
                beside.append(name)
                break
            further = [each for each in above.get(node, ()) if each not in own and each not in seen]
            seen.update(further)
            ahead += further
    return beside, mapped(output, Tensor.detach)


def _of_units(block: Block, leaves: Mapping[str, list[Tensor]]) -> list[Tensor]:
    """Return the zeros that are added to what makes the units of a block, see `_with_zeros`."""
    paths = [block.path] if block.kind == "head" else [source.rows.path for source in block.made_by]
    return [leaf for path in paths for leaf in leaves.get(path, ())]


@contextmanager
def _with_zeros(subject: Any) -> Iterator[dict[str, list[Tensor]]]:
    """While the context lasts, add zeros to what attention computes, and to the sources of neurons. Yields the zeros
    by the path of their module, each a leaf of the graph."""
    leaves: dict[str, list[Tensor]] = {}
    running: list[str] = []

    def added(path: str, x: Tensor) -> Tensor:
        leaf = torch.zeros_like(x).requires_grad_()
        leaves.setdefault(path, []).append(leaf)
        return x + leaf

    def through(attend: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Any:
        out = attend(query, key, value)
        return added(running[-1], out) if running and isinstance(out, Tensor) else out

    def leave(*_: Any) -> None:
        running.pop()

    neurons = {source.rows.path for block in subject.blocks if block.kind == "neuron" for source in block.made_by}
    with ExitStack() as stack:
        for path in {block.path for block in subject.blocks if block.kind == "head"}:
            module = subject.module.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        for path in neurons:
            module = subject.module.get_submodule(path)
            stack.callback(module.register_forward_hook(lambda m, x, output, path=path: added(path, output)).remove)
        stack.enter_context(AttentionCalls(through))
        yield leaves


@torch.enable_grad()
def _leaks(subject: Any, batch: Any, name: BlockId) -> bool:
    """Return whether units of a block still change an output while they are closed: if not, outputs have no derivative
    in the zeros that are added to what makes these units. Other units stay open, half of those of this block too:
    closed, they would hide what goes through them, or is multiplied with them."""
    read: dict[BlockId, Tensor] = {}
    block = subject.by_name[name]
    half = (block.heads + 1) // 2
    gates = all_open(subject, 1)[0].clone()
    gates[subject.grid.positions(name)[:half]] = 0
    with _with_zeros(subject) as leaves:
        outputs = subject.real_outputs(subject.run_gated(batch, gates, seen=read.setdefault), batch)
    mine, x = _of_units(block, leaves), read.get(name)
    if not mine or not outputs.requires_grad or x is None or not x.requires_grad:
        return False
    weights = torch.linspace(0.5, 1.5, outputs.numel()).to(outputs).view(outputs.shape)
    grad = partial(torch.autograd.grad, inputs=mine, retain_graph=True, allow_unused=True)
    closed = x[..., [column for unit in block.columns[:half] for column in unit]]
    pairs = zip(grad((outputs * weights).sum()), grad(closed.sum()), strict=True)
    return any(None not in pair and bool(((pair[0] != 0) & (pair[1] != 0)).any()) for pair in pairs)


def _around(subject: GatedModel, batch: Any, outs: set[str]) -> dict[str, str]:
    """Return, for each of these maps, the largest module around it that has the same input as its first one."""
    read: dict[str, Any] = {}

    def reading(path: str) -> Any:
        def keep(module: nn.Module, inputs: Any) -> None:
            read.setdefault(path, next(tensors_in(inputs), None))

        return keep

    above = {out: [out.rsplit(".", n)[0] for n in range(1, out.count(".") + 1)] for out in outs}
    with torch.no_grad(), ExitStack() as stack:
        for path in {path for out in outs for path in (out, *above[out])}:
            hook = subject.module.get_submodule(path).register_forward_pre_hook(reading(path))
            stack.callback(hook.remove)
        subject.run_gated(batch)
    found = {}
    for out, paths in above.items():
        same = [path for path in paths if same_tensor(read.get(path), read.get(out))]
        if same:
            found[out] = max(same, key=paths.index)
    return found


def _why_not(block: Block, outer: dict[str, str]) -> str:
    if block.out not in outer or LORA in block.why_not:
        return block.why_not
    return f"{block.out} and other maps of {outer[block.out]} read them"
