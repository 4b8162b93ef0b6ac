"""Close the heads two at a time, and compare the cost with the sum of closing each alone.

Dimensions: E = examples of the report split, N = all heads, P = pairs of them, M = masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch

from mhaprune.data import Data
from mhaprune.experiments.base import Experiment, Findings, Setup, the_one, with_proofs
from mhaprune.experiments.interact import report
from mhaprune.experiments.interact.report import BROKEN, NEITHER, STAND_IN, TOGETHER, other_heads
from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.measure.outcomes import BATCH_SIZE, measure_removed
from mhaprune.progress import doing, track
from mhaprune.pruning.plans import Plan, choices, plan_columns, plan_words, plans_of
from mhaprune.pruning.removal import EquivalenceCheck
from mhaprune.scorers.scoring import Scoring, head_columns
from mhaprune.settings.ranges import Ge
from mhaprune.statistics.intervals import CONFIDENCE, differs_p, moments, with_interval
from mhaprune.subject import Subject
from mhaprune.tables import INTERACTION, LOSS_RISE, OTHER_HEAD, QUALITY, named


@dataclass(frozen=True)
class Interact(Experiment):
    """The cost of two heads together beyond what each costs alone: tables `alone`, `pairs` and `together`.

    The interaction of heads i and j is the second difference of the loss, ℓ(ij) − ℓ(i) − ℓ(j) + ℓ, where ℓ(S) is the
    loss with the heads S closed. Above 0 they stand in for each other: closing one costs little while the other is
    open. Below 0 they work together: without one, the other is worth less. A pair is counted if its interaction is at
    least `tolerance_nats` in size and differs from 0 at 95 % confidence for all pairs together. If one head alone
    breaks the model, a negative interaction is no sign of working together, so such a pair has its own kind.

    `together` has the cost of removing many heads at once, in the order of each scorer, and the cost expected from
    single heads and from pairs.
    """

    tolerance_nats: Annotated[float, Ge(0)] = 0.01
    """The smallest interaction (in size) that is counted, in nats of mean loss."""

    question = "Which heads stand in for each other?"
    then = (
        "`experiment=prune schedule=[greedy]` chooses one head after the other, so that of two"
        " that stand in for each other one stays."
    )
    figures = (report.interactions, report.together)
    say = staticmethod(report.say)
    headline = staticmethod(report.headline)

    def check(self, setup: Setup) -> None:
        the_one(setup.schedules)
        setup.check_scorers()
        if len(setup.grid) < 2:
            raise ValueError(f"experiment=interact: the model has {len(setup.grid)} heads, a pair needs 2")

    def __call__(self, study: Study) -> Findings:
        subject, examples = study.subject, study.splits.report
        scoring = Scoring(subject, study.splits.score, study.seed, study.remember)
        budgets = range(len(subject.grid) + 1)
        with doing("score"):
            made = plans_of(choices(scoring, study.scorers, the_one(study.schedules), budgets))
        plans = [plan for plan in made if plan.draw == 0]
        every = HeadMask(subject.grid)
        alone = [every.without(head) for head in subject.grid]
        pairs = [every.without(*pair) for pair in combinations(subject.grid, 2)]
        rise_ME, quality_M = rises_and_quality(subject, examples, [*alone, *pairs, *(plan.mask for plan in plans)])
        alone_NE, pairs_PE, planned_ME = np.split(rise_ME, [len(alone), len(alone) + len(pairs)])
        first_P, second_P = np.triu_indices(len(alone), 1)
        interaction_PE = pairs_PE - alone_NE[first_P] - alone_NE[second_P]
        tables = {
            "alone": pd.DataFrame(
                head_columns(head) | with_interval(LOSS_RISE, rise_E) | {QUALITY: quality}
                for head, rise_E, quality in zip(subject.grid, alone_NE, quality_M[1:], strict=False)
            ).assign(open_quality=quality_M[0]),
            "pairs": pd.DataFrame(
                head_columns(first)
                | dict(zip(OTHER_HEAD, head_columns(second).values(), strict=True))
                | {LOSS_RISE: both_E.mean()}
                | with_interval(INTERACTION, interaction_E)
                for (first, second), both_E, interaction_E in zip(
                    combinations(subject.grid, 2), pairs_PE, interaction_PE, strict=True
                )
            ).assign(**{f"{INTERACTION}_p": differs_p(moments(interaction_PE.T)), "tolerance": self.tolerance_nats}),
            "together": together_table(plans, planned_ME, alone_NE.mean(axis=1), interaction_PE.mean(axis=1)),
        }
        tables["pairs"]["kind"] = kinds_of_pairs(tables["pairs"], tables["alone"])
        equivalence = EquivalenceCheck(subject, study.splits.proof)
        with doing("prove"):
            for plan in track(plans, "removed equals masked", name=plan_words):
                equivalence.prove(plan.mask)
        return with_proofs(study, tables, equivalence.worst)


def kinds_of_pairs(pairs: pd.DataFrame, alone: pd.DataFrame) -> list[str]:
    """Return the kind of each pair: `STAND_IN`, `TOGETHER`, `BROKEN` or, for a small or unsure interaction, `NEITHER`.
    A negative interaction is `BROKEN` if one head closed alone leaves at most half of the quality."""
    broken = set(named(alone[alone[QUALITY] <= alone["open_quality"] / 2]))
    breaks = [bool({first, second} & broken) for first, second in zip(named(pairs), other_heads(pairs), strict=True)]
    counts = (pairs[INTERACTION].abs() >= pairs["tolerance"]) & (pairs[f"{INTERACTION}_p"] < 1 - CONFIDENCE)
    cases = {NEITHER: ~counts, STAND_IN: pairs[INTERACTION] > 0, BROKEN: np.array(breaks, dtype=bool)}
    return list(np.select(list(cases.values()), list(cases), TOGETHER))


def rises_and_quality(subject: Subject, examples: Data, masks: Sequence[HeadMask]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rise of each example's loss when the heads of each mask are closed, (M, E), and the mean quality with
    all heads open and then under each mask, (1 + M,)."""
    masks = [HeadMask(subject.grid), *masks]
    parts = [measure_removed(subject, part, masks) for part in track(list(examples.batches(BATCH_SIZE)), "pairs")]
    loss_ME, quality_ME = (
        torch.cat(values, dim=1).double().cpu().numpy()
        for values in ([part.loss for part in parts], [part.quality for part in parts])
    )
    return loss_ME[1:] - loss_ME[0], quality_ME.mean(axis=1)


def together_table(
    plans: Sequence[Plan], planned_ME: np.ndarray, alone_N: np.ndarray, interaction_P: np.ndarray
) -> pd.DataFrame:
    """Return a row per plan: the cost of removing its heads together; `expected_alone`, the sum of the costs of its
    heads alone; and `expected_pairs`, this sum plus the interactions of all pairs of its heads."""
    interaction_NN = np.zeros((len(alone_N), len(alone_N)))
    interaction_NN[np.triu_indices(len(alone_N), 1)] = interaction_P
    rows: list[dict[str, Any]] = []
    for plan, rise_E in zip(plans, planned_ME, strict=True):
        gone_N = 1 - plan.mask.gates().numpy()
        alone = float(np.einsum("n,n->", gone_N, alone_N))
        pairs = float(np.einsum("i,ij,j->", gone_N, interaction_NN, gone_N))
        rows.append(
            plan_columns(plan)
            | with_interval(LOSS_RISE, rise_E)
            | {"expected_alone": alone, "expected_pairs": alone + pairs}
        )
    return pd.DataFrame(rows)
