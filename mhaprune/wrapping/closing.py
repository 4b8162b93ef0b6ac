"""A closed block must leave nothing of its units: prove it, and gate the module around W_O if W_O is not all that reads
them, as with an adapter that is not merged.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.measure.outcomes import all_open
from mhaprune.wrapping.blocks import Block, Unsupported, within
from mhaprune.wrapping.gated import GatedModel
from mhaprune.wrapping.layouts import LORA
from mhaprune.wrapping.neurons import name_neurons
from mhaprune.wrapping.tensors import is_linear, tensors_in


def closed_whole(subject: Any, batch: Any) -> Any:
    """Return the subject with its gates where they close all that reads the units. Raises `Unsupported`, which names
    the map, if there is no such place."""
    leaks = set(_leaking(subject, batch))
    readers = Counter(source.rows for block in subject.blocks if block.kind == "neuron" for source in block.made_by)
    wrapped = leaks | {
        block.out
        for block in subject.blocks
        if (_has_more(subject, block) if not _sources(block) else any(readers[s.rows] > 1 for s in block.made_by))
    }
    if not wrapped:
        return subject
    outer = _around(subject, batch, wrapped)
    taken: dict[str, str] = {}
    left = []
    for name, block in subject.by_name.items():
        at = outer.get(block.out, "")
        if any(place == at or within(block.out, place) for place in taken):
            continue  # an adapter, which the gate of the map that it adapts closes too
        taken |= {at: block.out} if at else {}
        left.append((name, replace(block, gate_at=at, why_not=_why_not(block, outer))))
    blocks = [block for _, block in left]
    names = [name for name, block in left if block.kind != "neuron"]
    names += name_neurons([block for block in blocks if block.kind == "neuron"])
    subject = subject.changed(blocks=tuple(blocks), names=tuple(names))
    for out in _leaking(subject, batch) if leaks else ():
        raise Unsupported(
            f"{out}: is not all that reads its units, so closing them leaves a part of what they say; gate what reads"
            " them, or merge it into this map first"
        )
    return subject


@torch.enable_grad()
def _leaking(subject: Any, batch: Any) -> Iterator[str]:
    """Yield the maps that read units whose sources still change an output while all units are closed."""
    leaves: dict[str, Tensor] = {}

    def hook(path: str) -> Any:
        def follow(module: nn.Module, inputs: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            leaf = leaves.setdefault(path, torch.zeros_like(output[..., :1, :]).requires_grad_())
            return output + leaf

        return follow

    sources = {block.out: _sources(block) for block in subject.blocks}
    with ExitStack() as stack:
        for path in {source.rows.path for each in sources.values() for source in each}:
            stack.callback(subject.module.get_submodule(path).register_forward_hook(hook(path)).remove)
        outputs = subject.outputs(batch, 0 * all_open(subject, 1)[0])
    if not outputs.requires_grad:
        return
    weights = torch.linspace(0.5, 1.5, outputs.numel()).to(outputs).view(outputs.shape)
    names = list(leaves)
    gradients = torch.autograd.grad((outputs * weights).sum(), [leaves[name] for name in names], allow_unused=True)
    moved = dict(zip(names, gradients, strict=True))
    for out, each in sources.items():
        for source in each:
            gradient = moved.get(source.rows.path)
            rows = [row for head in source.rows.heads for row in head]
            if gradient is not None and bool(gradient[..., rows].any()):
                yield out
                break


def _sources(block: Block) -> list[Any]:
    """Return the sources of what the units say: of heads, the values."""
    return [source for source in block.made_by if block.kind == "neuron" or source.role == "value"]


def _has_more(subject: GatedModel, block: Block) -> bool:
    """Return whether the module around W_O holds other linear maps, and not the sources of the units."""
    parent = subject.module.get_submodule(block.owner)
    return within(block.owner, block.path) and block.owner != block.path and sum(map(is_linear, parent.modules())) > 1


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
        same = [path for path in paths if _same(read.get(path), read.get(out))]
        if same:
            found[out] = max(same, key=paths.index)
    return found


def _same(one: Any, other: Any) -> bool:
    alike = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
    return alike and one.data_ptr() == other.data_ptr()


def _why_not(block: Block, outer: dict[str, str]) -> str:
    if block.out not in outer or LORA in block.why_not:
        return block.why_not
    return f"{block.out} and other maps of {outer[block.out]} read them"
