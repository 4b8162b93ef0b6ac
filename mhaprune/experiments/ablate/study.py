"""Score every head, remove the weakest for real, and measure what that costs and brings."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan
from typing import ClassVar

import pandas as pd

from mhaprune.experiments.ablate import words
from mhaprune.experiments.ablate.figures import accuracy_curves, accuracy_latency, compare_runs
from mhaprune.experiments.base import Findings, Setup, WithinTolerance, the_one
from mhaprune.pruning.plans import make_plans
from mhaprune.pruning.removal import proofs, prune, time_removed
from mhaprune.reporting.plots import Figures
from mhaprune.reporting.shared_figures import agreement, compare_curves, head_scores, training_curve
from mhaprune.schedules.budgets import check_budgets, heads_to_remove, removing
from mhaprune.scorers.agreement import rank_agreement, with_reference
from mhaprune.scorers.scoring import Scoring, heads_table
from mhaprune.statistics import spearman
from mhaprune.tables import CHOOSE_QUALITY, ENDS, GATE, INITIAL_GATE, QUALITY, QUARTILES
from mhaprune.trained import Study


@dataclass(frozen=True)
class Ablate(WithinTolerance):
    """Scorers × budgets: tables `summary`, `heads`, `pruning`, `agreement`, `latency` and `training`.

    For every scorer the summary names the largest budget that loses at most `tolerance` of exact match on the *choose*
    split, and the exact match at that budget on the *report* split. The first draw of a random scorer is treated like
    any other scorer. Its further draws are a control: only their accuracy is measured. A schedule that uses no scorer
    has a row under its own name.
    """

    budgets: tuple[int | float, ...] = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
    """How many heads to remove: shares of all heads (0.25) or numbers of heads (6)."""

    figures: ClassVar[Figures] = (
        accuracy_curves,
        head_scores,
        agreement,
        accuracy_latency,
        training_curve,
    )
    figures_over_runs: ClassVar[Figures] = (compare_curves, compare_runs)
    say = staticmethod(words.say)
    head_map = staticmethod(words.head_map)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budgets(self.budgets)

    def check(self, setup: Setup) -> None:
        schedule = the_one(setup.schedules)
        heads_to_remove(self.budgets, len(setup.grid), len(schedule.smallest(setup.grid).removed))
        if not setup.scorers:
            raise ValueError("scorer=[]: must name at least one scorer, for example scorer=[ablation]")

    def __call__(self, study: Study) -> Findings:
        subject, report = study.subject, study.splits.report
        scoring = Scoring(subject, study.splits.score, study.seed, study.remember)
        budgets = removing(heads_to_remove(self.budgets, len(subject.grid)), subject.grid)
        plans = list(make_plans(scoring, study.scorers, the_one(study.schedules), budgets))
        pruning, _, difference = prune(subject, plans, study.splits)
        latency = time_removed(
            subject, [plan for plan in plans if plan.draw == 0], report[: self.latency_batch], self.latency_rounds
        )
        pruning = pruning.merge(latency, how="left", on=[name for name in latency if name in pruning])
        heads = heads_table(scoring, study.scorers)
        alike = pd.concat([rank_agreement(heads), initial_gates(study.history)], ignore_index=True)
        return Findings(
            {
                "summary": summary_table(pruning, alike, self.tolerance),
                "heads": heads,
                "pruning": pruning,
                "agreement": alike,
                "latency": latency,
                "training": study.history,
            },
            {"max_difference_masked_removed": difference, **proofs(subject, report)},
        )


def initial_gates(history: pd.DataFrame) -> pd.DataFrame:
    """Rank correlation between the gates before and after training, as a row of `agreement`; no row if they started
    equal."""
    gates = history.filter(like=GATE)
    rho = spearman(gates.iloc[0], gates.iloc[-1]) if gates.shape[1] else nan
    return pd.DataFrame([] if isnan(rho) else [{"scorer": "gate", "other": INITIAL_GATE, "spearman": rho}])


def summary_table(pruning: pd.DataFrame, agreement: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """One row per scorer: the largest budget within `tolerance` of the dense exact match. Only first draws count."""
    rows = []
    for name, curve in pruning[pruning["draw"] == 0].groupby("scorer", sort=False):
        dense = curve[curve["heads_removed"] == 0].iloc[0]
        within = curve[CHOOSE_QUALITY] >= dense[CHOOSE_QUALITY] - tolerance
        best = curve[within].sort_values("heads_removed").iloc[-1]
        rows.append(
            {
                "scorer": name,
                "tolerance": tolerance,
                "heads_total": best["heads_total"],
                "heads_removed": best["heads_removed"],
                "removed": best["removed"],
                CHOOSE_QUALITY: best[CHOOSE_QUALITY],
                "dense_sequence_accuracy": dense[QUALITY],
                **{f"{QUALITY}{end}": best[f"{QUALITY}{end}"] for end in ENDS},
                **{f"speedup{end}": best[f"speedup{end}"] for end in QUARTILES},
                "spearman_with_ablation": with_reference(agreement, name).get("spearman", nan),
            }
        )
    return pd.DataFrame(rows)
