"""Remove heads for real, prove that it was done right, and measure what it costs and brings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import nan
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from mhaprune.data import Examples
from mhaprune.heads import Block, HeadGrid, HeadMask, Site
from mhaprune.measure import accuracy_columns, greedy_disagreements, logit_difference, measure, measure_masks
from mhaprune.schedules.base import Judge, Schedule
from mhaprune.schedules.budgets import Budget
from mhaprune.scorers.base import Budgeted, Scorer
from mhaprune.scorers.scoring import Scoring, naming
from mhaprune.store import option_name
from mhaprune.subject import Outcome, Subject
from mhaprune.tasks.base import Splits
from mhaprune.timing import CONTROL, DENSE, in_turn, ratios

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
    budget: str = ""


def make_plans(
    scoring: Scoring,
    scorers: Mapping[str, Scorer],
    schedule: Schedule,
    budgets: Sequence[Budget],
    name: str | None = None,
    draws: int | None = None,
    whole: HeadGrid | None = None,
) -> Iterator[Plan]:
    """A plan per scorer, draw and budget. Where scorers have no say there is one per budget, in the schedule's name.

    `name` is that of the schedule, by default its option's; of a scorer that draws several times the first `draws` are
    taken, by default all; `whole` are the heads before any were removed, by default the subject's.
    """
    subject, how, again = scoring.subject, name or option_name(schedule), schedule.asks() == "again"

    def loss(masks: Sequence[HeadMask]) -> Tensor:
        gates_MN = torch.stack([mask.gates(scoring.examples.source.device) for mask in masks])
        return measure_masks(subject, scoring.examples, gates_MN).loss.double().mean(dim=1)

    def judge(name: str, scorer: Scorer, draw: int) -> Judge:
        def score(left: Subject) -> Tensor:
            if left is subject:
                return scoring(name, scorer).scores.values[draw]
            with naming(name):
                return scorer(left, scoring.examples, scoring.seed).values[draw]

        return Judge(subject, score, loss, whole)

    def nobody(left: Subject) -> Tensor:
        raise AssertionError(f"schedule={how} promised to ask no scorer")

    if schedule.asks() == "never":
        masks = schedule(Judge(subject, nobody, loss, whole), budgets)
        yield from (Plan(how, 0, how, mask, budget.name) for budget, mask in zip(budgets, masks, strict=True))
        return
    for name, scorer in scorers.items():
        kept = [budget.heads_kept(subject.grid) for budget in budgets]
        asked = whom_to_ask(scorer, kept, len(subject.grid), again)
        for one in dict.fromkeys(asked):
            mine = [budget for budget, other in zip(budgets, asked, strict=True) if other == one]
            for draw in range(len(scoring(name, one).scores.values))[:draws]:
                masks = schedule(judge(name, one, draw), mine)
                yield from (Plan(name, draw, how, mask, budget.name) for budget, mask in zip(mine, masks, strict=True))


def whom_to_ask(scorer: Scorer, kept: Sequence[int], num_heads: int, again: bool = False) -> list[Scorer]:
    """The scorer that says which heads go, for every number that is to stay: a `Budgeted` one is told that number.

    Where none or all go there is no choice, and whoever is asked anyway will do; save where it is asked `again`, down
    to the last head.
    """
    if not isinstance(scorer, Budgeted):
        return [scorer] * len(kept)
    told = {count: scorer.keeping(count) for count in kept if 0 < count < num_heads}
    if again and 0 in kept:
        told[0] = scorer.keeping(1)
    anybody = next(iter(told.values()), scorer)
    return [told.get(count, anybody) for count in kept]


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
    removal = Removal(subject, splits.report)
    measured: dict[HeadMask, dict[str, Any]] = {}
    reported: dict[HeadMask, Outcome] = {}
    chosen: dict[HeadMask, dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    for plan in tqdm(plans, "pruning", disable=None, leave=False):
        mask = plan.mask
        to_choose = plan.draw == 0 and mask not in chosen
        if mask not in measured or to_choose:
            smaller = subject.without(mask)
        if mask not in measured:
            removal.prove(mask)
            reported[mask] = measure(smaller, splits.report)
            measured[mask] = accuracy_columns(reported[mask]) | size_columns(smaller, splits.report)
        if to_choose:
            chosen[mask] = choose_columns(smaller, splits.choose)
        rows.append(plan_columns(plan) | measured[mask] | (chosen[mask] if plan.draw == 0 else {}))
    return Pruned(pd.DataFrame(rows), reported, removal.worst)


class Removal:
    """The proof that removing heads of a subject does what masking them does; `worst` is the largest difference of a
    logit so far."""

    def __init__(self, subject: Subject, report: Examples) -> None:
        self.precise, self.batch, self.worst = subject.in_double(), report[:PROOF_BATCH], 0.0

    def prove(self, mask: HeadMask) -> None:
        """Raises `ProofFailed`."""
        gates_N = mask.gates(self.batch.source.device)
        difference = logit_difference(self.precise, self.precise.without(mask), self.batch, gates_N)
        if not difference <= MAX_DIFFERENCE:
            raise ProofFailed(
                f"masked and removed differ by {difference:.3g} in a logit, allowed is {MAX_DIFFERENCE:g};"
                f" removed: {_names(mask) or 'none'}"
            )
        self.worst = max(self.worst, difference)


def size_columns(subject: Subject, report: Examples) -> dict[str, int]:
    """Its parameters, and the floating-point operations of an example."""
    batch = report[:PROOF_BATCH]
    return {"parameters": subject.count_parameters(), "flops": subject.count_flops(batch) // len(batch)}


def choose_columns(subject: Subject, choose: Examples) -> dict[str, float]:
    """What is looked at to choose between models: no number to report."""
    outcome = measure(subject, choose)
    return {f"choose_{name}": float(values.mean()) for name, values in outcome._asdict().items()}


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
    block in which closing any head moves nothing: it would look as if none of them mattered. An encoder that no head of
    cross-attention is left to read does not count.
    """
    precise, everything = subject.in_double(), HeadMask(subject.grid)
    bites: dict[Block, float] = {}
    for head in subject.grid:
        bite = logit_difference(precise, precise, batch, everything.without(head).gates(batch.source.device))
        bites[head.block] = max(bite, bites.get(head.block, 0.0))
    crosses = {block for block in subject.grid.blocks if block.site is Site.CROSS}
    if crosses and not crosses & bites.keys():
        bites = {block: bite for block, bite in bites.items() if block.site is not Site.ENCODER_SELF}
    for block, bite in bites.items():
        if bite == 0:
            raise ProofFailed(f"closing any head of block {block} changes no logit: its mask is ignored")
    return min(bites.values(), default=nan)


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
    rows = [plan_columns(plan) | _speed(times, _names(plan.mask) or DENSE) for plan in plans]
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


def plan_columns(plan: Plan) -> dict[str, Any]:
    """What says which heads went and why."""
    total, removed = len(plan.mask.grid), len(plan.mask.removed)
    return {
        "scorer": plan.scorer,
        "draw": plan.draw,
        "schedule": plan.schedule,
        "budget": plan.budget,
        "heads_total": total,
        "heads_kept": total - removed,
        "heads_removed": removed,
        "fraction_removed": removed / total if total else 0.0,
        "removed": _names(plan.mask),
    }
