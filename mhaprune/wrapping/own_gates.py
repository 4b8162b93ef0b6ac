"""Learned numbers by which a model's own layers multiply the outputs of their heads.

The exercise of the course has such a layer: a softmax over one number per head. Its code stays as it is. When heads go,
the softmax of the numbers that are left is another one, and W_O makes up for it.

Dimensions: H = heads of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mhaprune.discovery.attention import factors_of_heads
from mhaprune.hooks.blocks import Unsupported, weight_of
from mhaprune.hooks.eval_mode import ModelCall
from mhaprune.measure.outcomes import weight_sums
from mhaprune.proofs.block_by_block import AllInDouble
from mhaprune.subjects.batches import Batches
from mhaprune.subjects.gated_model import GatedModel

Model = TypeVar("Model", bound=GatedModel)
LARGEST = 1e6
"""The largest number by which W_O can make up for a factor. A larger one is that of a factor that is 0 but for
rounding."""
Run = Callable[[nn.Module, Any], Any]
"""A function that calls a model with a batch in the form of the user."""


def own_factors(subject: GatedModel, run: Run, sample: Batches, in_double: bool = False) -> dict[str, Tensor]:
    """Return the factors of the heads of each layer that has any, (H,) in float64, by the path of W_O; see
    `Block.gated_by_layer`. If `in_double`, code that asks for float32 computes in float64 too, as in a proof."""
    precise = subject.in_double()
    with AllInDouble() if in_double else nullcontext():
        return factors_of_heads(ModelCall(precise.module, precise.placed(sample), run), precise.blocks)


def with_constant_gates(subject: Model, run: Run, samples: Sequence[Batches]) -> Model:
    """Return the subject in which only those layers count as gated by themselves whose factors are the same in all
    calls and for all of these samples: others belong to the input."""
    if not any(block.gated_by_layer for block in subject.blocks):
        return subject
    first, *others = (own_factors(subject, run, sample) for sample in samples)

    def constant(out: str) -> bool:
        return all(out in each and torch.allclose(first[out], each[out]) for each in (first, *others))

    blocks = [replace(each, gated_by_layer=each.gated_by_layer and constant(each.out)) for each in subject.blocks]
    return subject.with_module(subject.module, blocks)


@torch.no_grad()
def with_factors_of(smaller: Model, larger: GatedModel, run: Run, sample: Batches, known: dict[Any, Any]) -> Model:
    """Return the subject without some heads with another W_O, changed in place, in each layer that lost heads and
    multiplies them by learned numbers: so that each head that is left counts as much as in the larger model. Raises
    `Unsupported` where W_O cannot make up for that. `known` keeps the factors of larger models by their weights."""
    pairs = [*zip(smaller.blocks, larger.blocks, strict=True)]
    lost = {block.out for block, whole in pairs if whole.gated_by_layer and 0 < block.heads < whole.heads}
    if not lost:
        return smaller
    of_whole = ("factors", weight_sums(larger.module))
    if of_whole not in known:
        known[of_whole] = [own_factors(larger, run, sample, double) for double in (False, True)]
    of_both = [
        *zip(known[of_whole], (own_factors(smaller, run, sample, double) for double in (False, True)), strict=True)
    ]
    blocks, done = [], dict[int, tuple[str, Tensor]]()
    for block, whole in pairs:
        if not 0 < block.heads < whole.heads:
            blocks.append(block)
            continue
        change = scaled = torch.ones(block.heads, dtype=torch.double)
        if block.out in lost:
            if any(block.out not in now for _, now in of_both):
                raise Unsupported(f"{block.path}: its own factors depend on the input when other heads are gone")
            kept = [whole.names.index(name) for name in block.names]
            change, scaled = ((before[whole.out][kept] / now[block.out]).nan_to_num(1.0) for before, now in of_both)
            block = replace(block, scaled=tuple(scaled.tolist()))
        if not float(scaled.abs().max()) < LARGEST:
            raise Unsupported(f"{block.path}: its own factor of a head is 0 when other heads are gone")
        blocks.append(block)
        for out in block.outs:
            weight = weight_of(smaller.module.get_submodule(out))
            first, other = done.setdefault(weight.data_ptr(), (out, scaled))
            if first == out:
                weight[:, block.order] *= change.repeat_interleave(block.head_dim).to(weight)
            elif not torch.equal(other, scaled):
                raise Unsupported(f"{first} and {out}: are one weight, but their factors change unequally")
    return smaller.with_module(smaller.module, blocks)
