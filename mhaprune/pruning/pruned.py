"""Remove heads from a model, prove the removal correct, and measure the smaller model."""

from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from typing import Any, NamedTuple

import pandas as pd

from mhaprune.data import Data, Splits
from mhaprune.heads import HeadMask
from mhaprune.measure.accuracy import choose_columns, size_columns, worst_columns
from mhaprune.measure.outcomes import (
    MAX_DIFFERENCE,
    ProofFailed,
    gate_effects,
    greedy_disagreements,
    measure,
    output_difference,
)
from mhaprune.measure.times import clock_for, copies, copies_that_fit, in_turn, speed_columns, taking_turns
from mhaprune.progress import track
from mhaprune.pruning.plans import Plan, plan_columns, plan_words, removed_names
from mhaprune.subject import DecodesGreedily, Outcome, Subject
from mhaprune.tables import DENSE, DENSE_AGAIN


class PruningResult(NamedTuple):
    """A table with one row per plan (accuracy on the report and choose splits, size), the outcomes of each mask, and
    the largest difference between a logit with heads removed and the logit with the same heads masked."""

    table: pd.DataFrame
    reported: dict[HeadMask, Outcome]
    difference: float


def prune(subject: Subject, plans: Sequence[Plan], splits: Splits[Data]) -> PruningResult:
    """Remove the heads of every plan and measure the smaller models. Equal masks are measured once.

    The *choose* columns are filled only for the first draw of each scorer. The other draws are a control, and no model
    is chosen from them. Raises `ProofFailed` if a pruned model differs from the masked one.
    """
    equivalence = EquivalenceCheck(subject, splits.proof)
    whole = subject.without(HeadMask(subject.grid))
    dense = measure(whole, splits.choose)
    first = measure(whole, splits.report) if splits.report.by_kind() else None
    measured: dict[HeadMask, dict[str, Any]] = {}
    reported: dict[HeadMask, Outcome] = {}
    chosen: dict[HeadMask, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for plan in track(plans, "plan", name=plan_words):
        mask = plan.mask
        to_choose = plan.draw == 0 and mask not in chosen
        if mask not in measured or to_choose:
            smaller = subject.without(mask, shared=True)
        if mask not in measured:
            equivalence.prove(mask)
            reported[mask] = measure(smaller, splits.report)
            measured[mask] = worst_columns(reported[mask], first or reported[mask], splits.report)
            measured[mask] |= size_columns(smaller, splits.report)
        if to_choose:
            chosen[mask] = choose_columns(measure(smaller, splits.choose), dense, splits.choose)
        rows.append(plan_columns(plan) | measured[mask] | (chosen[mask] if plan.draw == 0 else {}))
    return PruningResult(pd.DataFrame(rows), reported, equivalence.worst)


class EquivalenceCheck:
    """A proof, for one mask after the other, that removing heads of a subject equals masking them. `worst` is the
    largest difference between two outputs so far."""

    def __init__(self, subject: Subject, tried: Data, difference: Callable[[HeadMask], float] | None = None) -> None:
        self.difference, self.worst = difference or subject.removal_proof(tried), 0.0

    def prove(self, mask: HeadMask) -> None:
        """Raise `ProofFailed` if removal and masking of these heads differ."""
        difference = self.difference(mask)
        if not difference <= MAX_DIFFERENCE:
            raise ProofFailed(
                f"masked and removed differ by {difference:.3g}, allowed is {MAX_DIFFERENCE:g};"
                f" removed: {removed_names(mask) or 'none'}"
            )
        self.worst = max(self.worst, difference)


def proofs(subject: Subject, report: Data) -> dict[str, float]:
    """Return checks of a model: the effect of the gates of the weakest block, see `smallest_effect`; and, for a model
    that decodes, the number of examples on which greedy decoding and exact match disagree. Every run that closes heads
    makes these checks."""
    checks: dict[str, float] = {"smallest_gate_effect": smallest_effect(subject, report.few())}
    if isinstance(subject, DecodesGreedily):
        checks["greedy_decoding_disagreements"] = greedy_disagreements(subject, report)
    return checks


def smallest_effect(subject: Subject, batch: Data) -> float:
    """Compute, for each block, the largest effect of a gate (see `gate_effects`). Return the smallest of these over all
    blocks.

    Raises `ProofFailed` if all gates of a block have no
    effect: its heads would look useless. Blocks whose output is not used do not count.
    """
    effects = subject.grid.split(gate_effects(subject, batch)[0])
    largest = {block: float(effects_H.max()) for block, effects_H in effects.items() if len(effects_H)}
    for block in subject.unread():
        largest.pop(block, None)
    for block in [block for block, effect in largest.items() if effect == 0]:
        closed = HeadMask(subject.grid, frozenset(head for head in subject.grid if head.block == block))
        gates = (mask.gates(subject.device) for mask in (HeadMask(subject.grid), closed))
        if not output_difference(subject, subject, batch, *gates):
            raise ProofFailed(f"closing any head of block {block} changes no output: its mask is ignored")
        largest.pop(block)  # its effect has no derivative, as behind a rounding
    return min(largest.values(), default=nan)


def time_removed(subject: Subject, plans: Sequence[Plan], batch: Data, rounds: int) -> pd.DataFrame:
    """Time one `predict` of the batch. Return one row per plan, then two rows of the dense model.

    The second dense row shows the noise: its speed-up should be 1. Each round calls every model once, in random order.
    A model has several copies, and each call uses the next one. The columns come from `plan_columns` and
    `speed_columns`; `timed_examples` is the size of the batch. The gates of the dense model are folded into its weights
    too, because folding must not count as a speed-up.
    """
    makers = {name: partial(subject.without, HeadMask(subject.grid)) for name in (DENSE, DENSE_AGAIN)}
    makers |= {removed_names(plan.mask): partial(subject.without, plan.mask) for plan in plans if plan.mask.removed}
    number = copies_that_fit(subject.count_parameters() * subject.dtype.itemsize, len(makers))
    calls = {
        name: taking_turns([partial(model.predict, batch) for model in models])
        for name, models in copies(makers, number).items()
    }
    times = in_turn(calls, rounds, warmup=number, device=subject.device, clock=clock_for(subject.device))
    rows = [plan_columns(plan) | speed_columns(times, DENSE, removed_names(plan.mask) or DENSE) for plan in plans]
    again = (DENSE, DENSE_AGAIN)
    rows += [{"scorer": name, "draw": 0, "heads_removed": 0} | speed_columns(times, DENSE, name) for name in again]
    return pd.DataFrame(rows).assign(timed_examples=len(batch))
