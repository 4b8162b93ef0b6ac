"""Remove heads for real, prove that it was done right, and measure what it costs and brings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from mhaprune.data import Examples
from mhaprune.heads import Block, HeadMask
from mhaprune.measure import accuracy_columns, greedy_disagreements, logit_difference, measure, measure_masks
from mhaprune.schedules.base import Judge, Schedule
from mhaprune.scorers.base import Budgeted, Scorer
from mhaprune.scoring import Scoring, naming
from mhaprune.speed import CONTROL, DENSE, in_turn, ratios
from mhaprune.store import option_name
from mhaprune.subject import Outcome, Subject
from mhaprune.tasks.base import Splits

PROOF_BATCH = 16
MAX_DIFFERENCE = 1e-9
"""How far the logits of a model with removed heads may be from those with the same heads masked, in float64.

In float32 rounding alone makes 1e-5 of it, in which a small fault could hide.
"""


class Plan(NamedTuple):
    """One mask and how it came about."""

    scorer: str
    draw: int
    schedule: str
    mask: HeadMask


def make_plans(
    scoring: Scoring, scorers: Mapping[str, Scorer], schedule: Schedule, budgets: Sequence[int]
) -> Iterator[Plan]:
    """A plan per scorer, draw and budget. Where scorers have no say there is one per budget, in the schedule's name."""
    subject, num_heads, how = scoring.subject, len(scoring.subject.grid), option_name(schedule)

    def loss(masks: Sequence[HeadMask]) -> Tensor:
        gates_MN = torch.stack([mask.gates(scoring.examples.source.device) for mask in masks])
        return measure_masks(subject, scoring.examples, gates_MN).loss.double().mean(dim=1)

    def judge(name: str, scorer: Scorer, draw: int) -> Judge:
        def score(left: Subject) -> Tensor:
            if left is subject:
                return scoring(name, scorer).scores.values[draw]
            with naming(name):
                return scorer(left, scoring.examples, scoring.seed).values[draw]

        return Judge(subject, score, loss)

    def nobody(left: Subject) -> Tensor:
        raise AssertionError(f"schedule={how} promised to ask no scorer")

    if schedule.asks() == "never":
        yield from (Plan(how, 0, how, mask) for mask in schedule(Judge(subject, nobody, loss), budgets))
        return
    for name, scorer in scorers.items():
        asked = whom_to_ask(scorer, budgets, num_heads)
        for one in dict.fromkeys(asked.values()):
            for draw in range(len(scoring(name, one).scores.values)):
                masks = schedule(judge(name, one, draw), [budget for budget in budgets if asked[budget] == one])
                yield from (Plan(name, draw, how, mask) for mask in masks)


def whom_to_ask(scorer: Scorer, budgets: Sequence[int], num_heads: int) -> dict[int, Scorer]:
    """The scorer that says which heads go, for every budget: a `Budgeted` one is told how many are to stay.

    Where none or all go there is no choice, and whoever is asked anyway will do.
    """
    if not isinstance(scorer, Budgeted):
        return dict.fromkeys(budgets, scorer)
    told = {budget: scorer.keeping(num_heads - budget) for budget in budgets if 0 < budget < num_heads}
    anybody = next(iter(told.values()), scorer)
    return {budget: told.get(budget, anybody) for budget in budgets}


class ProofFailed(RuntimeError):
    """Removing heads did not do what masking them does, or masking them did nothing."""


class Pruned(NamedTuple):
    """One row per plan: its accuracy on the report split and for choosing, and its size; the outcomes behind it; and
    the proof, the largest difference of a logit between any removed model and the same heads masked."""

    table: pd.DataFrame
    reported: dict[HeadMask, Outcome]
    difference: float


def prune(subject: Subject, plans: Sequence[Plan], splits: Splits) -> Pruned:
    """Remove the heads of every plan for real and measure what is left; equal masks are measured once.

    The *choose* columns are filled for the first draw of each scorer: the others are a control among which nothing is
    chosen. Raises `ProofFailed` where a removed model is not the masked one.
    """
    proof, precise = splits.report[:PROOF_BATCH], subject.in_double()
    measured: dict[HeadMask, dict[str, Any]] = {}
    reported: dict[HeadMask, Outcome] = {}
    chosen: dict[HeadMask, dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    worst = 0.0
    for plan in tqdm(plans, "pruning", disable=None, leave=False):
        mask = plan.mask
        to_choose = plan.draw == 0 and mask not in chosen
        if mask not in measured or to_choose:
            smaller = subject.without(mask)
        if mask not in measured:
            difference = logit_difference(precise, precise.without(mask), proof, mask.gates(proof.source.device))
            if not difference <= MAX_DIFFERENCE:
                raise ProofFailed(
                    f"masked and removed differ by {difference:.3g} in a logit, allowed is {MAX_DIFFERENCE:g};"
                    f" removed: {_names(mask) or 'none'}"
                )
            worst = max(worst, difference)
            reported[mask] = measure(smaller, splits.report)
            measured[mask] = accuracy_columns(reported[mask])
            measured[mask] |= {
                "parameters": smaller.count_parameters(),
                "flops": smaller.count_flops(proof) // len(proof),
            }
        if to_choose:
            outcome = measure(smaller, splits.choose)
            chosen[mask] = {f"choose_{name}": float(values.mean()) for name, values in outcome._asdict().items()}
        rows.append(_identity(plan) | measured[mask] | (chosen[mask] if plan.draw == 0 else {}))
    return Pruned(pd.DataFrame(rows), reported, worst)


def proofs(subject: Subject, report: Examples) -> dict[str, float]:
    """What every run that closes heads shows of its model: that each block's mask bites, and that greedy decoding and
    exact match agree."""
    return {
        "min_difference_open_closed": smallest_bite(subject, report[:PROOF_BATCH]),
        "greedy_decoding_disagreements": greedy_disagreements(subject, report),
    }


def smallest_bite(subject: Subject, batch: Examples) -> float:
    """That the mask bites, block by block: how far closing its strongest head moves a logit; of all blocks the least.

    Computed in float64, in which also a gate that training has nearly closed leaves a trace. Raises `ProofFailed` for a
    block in which closing any head moves nothing: it would look as if none of them mattered.
    """
    precise, everything = subject.in_double(), HeadMask(subject.grid)
    bites: dict[Block, float] = {}
    for head in subject.grid:
        bite = logit_difference(precise, precise, batch, everything.without(head).gates(batch.source.device))
        bites[head.block] = max(bite, bites.get(head.block, 0.0))
    for block, bite in bites.items():
        if bite == 0:
            raise ProofFailed(f"closing any head of block {block} changes no logit: its mask is ignored")
    return min(bites.values())


def time_removed(subject: Subject, plans: Sequence[Plan], batch: Examples, rounds: int) -> pd.DataFrame:
    """Milliseconds of one `predict` of the batch: one row per plan, then the dense model and the same again (A/A).

    All models take turns. Speed-ups are dense over removed, round by round: median and quartiles. The dense model has
    its gates folded into the weights too, so that no speed-up is owed to the gates.
    """
    models = {name: subject.without(HeadMask(subject.grid)) for name in (DENSE, CONTROL)}
    for mask in {plan.mask: None for plan in plans}:
        if mask.removed:
            models[_names(mask)] = subject.without(mask)
    calls = {name: partial(model.predict, batch) for name, model in models.items()}
    times = in_turn(calls, rounds, device=batch.source.device)
    rows = [_identity(plan) | _speed(times, _names(plan.mask) or DENSE) for plan in plans]
    rows += [{"scorer": name, "draw": 0, "heads_removed": 0} | _speed(times, name) for name in (DENSE, CONTROL)]
    return pd.DataFrame(rows)


def _names(mask: HeadMask) -> str:
    """The removed heads, in the order of the grid; empty for none."""
    return " ".join(str(head) for head in mask.grid if head in mask.removed)


def _speed(times: pd.DataFrame, name: str) -> dict[str, float]:
    ratio = ratios(times, DENSE, name)
    return {
        "latency_ms": ratio["peer_ms"],
        "speedup": ratio["ratio"],
        "speedup_q1": ratio["q1"],
        "speedup_q3": ratio["q3"],
    }


def _identity(plan: Plan) -> dict[str, Any]:
    total, removed = len(plan.mask.grid), len(plan.mask.removed)
    return {
        "scorer": plan.scorer,
        "draw": plan.draw,
        "schedule": plan.schedule,
        "heads_total": total,
        "heads_kept": total - removed,
        "heads_removed": removed,
        "fraction_removed": removed / total if total else 0.0,
        "removed": _names(plan.mask),
    }
