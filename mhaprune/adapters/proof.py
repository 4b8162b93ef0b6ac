"""The proofs that a wrapped model is understood: every head bites, and removing heads does what masking them does.

Dimensions: B = batch, H = heads of a block, N = all heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhaprune.adapters.batches import Batches
from mhaprune.adapters.blocks import Unsupported
from mhaprune.adapters.replay import Replay
from mhaprune.adapters.returned import tensors_in
from mhaprune.adapters.wrapped import WrappedModel
from mhaprune.heads import HeadId, HeadMask
from mhaprune.measure import output_difference
from mhaprune.pruning.removal import MAX_DIFFERENCE, ProofFailed


class Proven(NamedTuple):
    """What was found."""

    smallest_bite: float
    """How far closing a head moves an output, for the head that moves it least."""
    difference: float
    """The largest difference of an output between heads masked and removed; NaN where removal was not tried."""
    why_not: str
    """Why heads cannot be removed; empty where they can."""


def prove(subject: WrappedModel, batch: Batches) -> Proven:
    """On the first examples of a batch, in float64. Raises `ProofFailed` for a head whose gate changes nothing."""
    precise, few = subject.in_double(), batch[:2]
    bite = _smallest_bite(precise, few[:1])
    if subject.why_not:
        path, reason = next(iter(subject.why_not.items()))
        return Proven(bite, float("nan"), f"{path}: {reason}")
    worst = 0.0
    for mask in _masks(precise):
        try:
            worst = max(worst, output_difference(precise, precise.without(mask), few, mask.gates(precise.device)))
        except Unsupported as error:
            return Proven(bite, float("nan"), str(error))
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            return Proven(bite, float("nan"), f"a model with heads removed does not run ({reason})")
    if not worst <= MAX_DIFFERENCE:
        return Proven(bite, worst, f"masked and removed differ by {worst:.3g}, allowed is {MAX_DIFFERENCE:g}")
    return Proven(bite, worst, "")


def _smallest_bite(precise: WrappedModel, one: Batches) -> float:
    """Each head of a block is closed in one row of a batch that holds one example again and again; what comes before
    the block is computed once for all blocks."""
    smallest, most = float("inf"), max(precise.grid.sizes)
    rows = _to(precise, one.repeated(most + 1))
    replay = Replay(precise.model, [block.out for block in precise.blocks])
    with torch.no_grad(), replay.recording():
        precise.run_gated(rows)
    for name, block in zip(precise.names, precise.blocks, strict=True):
        positions = precise.grid.positions(name)
        if not len(positions):
            continue
        gates_BN = torch.ones(len(rows), len(precise.grid), dtype=precise.dtype, device=precise.device)
        for row, n in enumerate(positions):
            gates_BN[row, n] = 0.0
        with torch.no_grad(), replay.until([block.out]):
            said = per_example(precise.run_gated(rows, gates_BN), len(rows))
        bites = (said[: len(positions)] - said[-1]).abs().amax(dim=1)
        if not bites.isfinite().all():
            raise Unsupported("model: an output is not finite, nothing can be compared")
        smallest = min(smallest, float(bites.min()))
        if smallest == 0:
            head: HeadId = precise.grid.heads[positions[int(bites.argmin())]]
            raise ProofFailed(f"closing head {head} changes no output of the model: its gate is ignored")
    return smallest


def _masks(subject: WrappedModel) -> list[HeadMask]:
    """None removed, one head, a ragged mask, and one block without heads."""
    everything, grid = HeadMask(subject.grid), subject.grid
    full = [block for block, size in zip(grid.blocks, grid.sizes, strict=True) if size]
    if not full:
        return [everything]
    of_block = [[head for head in grid if head.block == block] for block in full]
    one = everything.without(of_block[0][-1])
    ragged = everything.without(*(head for i, heads in enumerate(of_block) for head in heads[: i % len(heads)]))
    return [everything, one, ragged, everything.without(*of_block[-1])]


def per_example(output: Any, batch_size: int) -> Tensor:
    """(B, numbers): every real number in what a model returned that belongs to one example."""
    numbers = [value for value in tensors_in(output) if value.is_floating_point() and value.dim()]
    parts = [value.reshape(batch_size, -1) for value in numbers if len(value) == batch_size]
    if not parts:
        raise ValueError("model: returns no tensor with a row per example, nothing can be compared")
    return torch.cat(parts, dim=1)


def _to(subject: WrappedModel, batch: Batches) -> Batches:
    return batch.converted(subject.device, subject.dtype)
