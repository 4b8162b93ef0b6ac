"""The proofs that a wrapped model is understood: which gates have an effect, and that removing heads does what masking
them does.

Dimensions: N = all heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mhaprune.adapters.batches import Batches
from mhaprune.adapters.blocks import Unsupported
from mhaprune.adapters.wrapped import WrappedModel
from mhaprune.heads import HeadId, HeadMask
from mhaprune.measure import MAX_DIFFERENCE, gate_effects, output_difference


class Proven(NamedTuple):
    """What was found."""

    smallest_effect: float
    """The smallest effect of a gate on the outputs that is not zero, see `gate_effects`."""
    without_effect: tuple[HeadId, ...]
    """The heads whose gates change no output of the examples that were looked at."""
    difference: float
    """The largest difference of an output between heads masked and removed; NaN where removal was not tried."""
    why_not: str
    """Why heads cannot be removed; empty where they can."""


def prove(subject: WrappedModel, batch: Batches) -> Proven:
    """Prove both in float64, on the first examples of a batch. Raises `Unsupported` for a model whose outputs cannot be
    compared, and where no gate has an effect."""
    precise, few = subject.in_double(), batch[:2]
    _comparable(precise, few)
    effects_N = gate_effects(precise, few).abs()
    without_effect = tuple(head for head, effect in zip(precise.grid, effects_N, strict=True) if effect == 0)
    if len(precise.grid) and len(without_effect) == len(precise.grid):
        raise Unsupported(
            "model: closing a head changes no output, whichever head it is: its outputs have no gradient, or a layer"
            " after the heads has only zeros, as before training"
        )
    effect = float(effects_N[effects_N > 0].min()) if len(precise.grid) else float("nan")
    if subject.why_not:
        path, reason = next(iter(subject.why_not.items()))
        return Proven(effect, without_effect, float("nan"), f"{path}: {reason}")
    worst = 0.0
    for mask in _masks(precise):
        try:
            worst = max(worst, output_difference(precise, precise.without(mask), few, mask.gates(precise.device)))
        except Unsupported as error:
            return Proven(effect, without_effect, float("nan"), str(error))
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            why_not = f"a model with heads removed does not run ({reason})"
            return Proven(effect, without_effect, float("nan"), why_not)
    why_not = (
        "" if worst <= MAX_DIFFERENCE else f"masked and removed differ by {worst:.3g}, allowed is {MAX_DIFFERENCE:g}"
    )
    return Proven(effect, without_effect, worst, why_not)


def _comparable(precise: WrappedModel, few: Batches) -> None:
    """Raise `Unsupported` for outputs that are none, not finite, or others in each pass."""
    try:
        with torch.no_grad():
            first, again = precise.outputs(few), precise.outputs(few)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise Unsupported(f"model: does not compute in float64, in which proofs are made ({reason})") from None
    if not first.numel():
        raise Unsupported("model: returns no tensor of real numbers, so nothing can be compared")
    if not first.isfinite().all():
        raise Unsupported("model: an output is not finite, so nothing can be compared")
    moved = float((first - again).abs().max())
    if moved > MAX_DIFFERENCE * max(1.0, float(first.abs().max())):
        raise Unsupported(
            f"model: draws random numbers in evaluation, two passes over the same examples differ by {moved:.3g}, so"
            " scores would be noise; fix them: call=lambda model, batch: (torch.manual_seed(0), model(**batch))[1]"
        )


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
