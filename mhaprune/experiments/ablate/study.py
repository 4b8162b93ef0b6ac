"""Score every head, remove the weakest heads from the model, and measure the cost and the speed-up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from mhaprune.experiments.ablate import report
from mhaprune.experiments.base import Findings, HeadBudgets, Setup, WithinTolerance, the_one, with_proofs
from mhaprune.experiments.can_go import most_removed, summary_of
from mhaprune.experiments.shift import shift_quality
from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.measure.columns import accuracy_columns, choose_columns, size_columns
from mhaprune.measure.outcomes import measure
from mhaprune.progress import doing, track
from mhaprune.pruning.plans import Plan, choices, plan_columns, plan_words, plans_of, removed_names
from mhaprune.pruning.removal import prune, time_removed
from mhaprune.pruning.shift import shift_table
from mhaprune.recoveries.base import recover
from mhaprune.reporting.plots import appendix
from mhaprune.reporting.shared_figures import agreement
from mhaprune.reporting.training import training_curve
from mhaprune.scorers.agreement import rank_agreement
from mhaprune.scorers.scoring import Scoring, heads_table
from mhaprune.subject import Subject
from mhaprune.tables import NOTHING


@dataclass(frozen=True)
class Ablate(HeadBudgets, WithinTolerance):
    """Scorers × budgets: tables `summary`, `heads`, `pruning`, `agreement`, `latency` and `training`; and
    `recovered`, models after a recovery (by default a refit).

    For every scorer, `summary` has the pruned model with the most heads removed that loses at most `tolerance` of exact
    match on the *choose* split, and its exact match on the *report* split. `heads_removed_sure` heads can be removed at
    95 % confidence (see `can_go.py`). The first draw of a random scorer is treated like any other scorer. Its further
    draws are a control: only their accuracy is measured. A schedule that uses no scorer has a row under its own name.

    `shift` has the models of the summary on examples of other kinds, if the task or `shift` has any.

    Only the models of one scorer are recovered, because a recovery takes longer than a measurement: the scorer that can
    remove the most heads without a recovery. Recovered models have rows of their own in the summary.
    """

    calibrated: bool = False
    """Whether the confidence of the models in their answers is measured on examples of other kinds. For this a model
    writes its wrong answers again."""

    recovers = measures_shift = True
    question = "Which heads can be removed, and what does that bring?"
    then = (
        "`experiment=explain` shows what the heads look at; `experiment=prune` looks for still"
        " smaller models and saves them."
    )
    figures = (report.accuracy_curves, agreement, report.latency_curves, shift_quality, appendix(training_curve))
    say = staticmethod(report.say)
    headline = staticmethod(report.headline)
    head_map = staticmethod(report.head_map)

    def check(self, setup: Setup) -> None:
        the_one(setup.schedules)
        super().check(setup)
        setup.check_scorers()
        if others := [name for name, recovery in setup.recoveries.items() if not recovery.follows]:
            raise ValueError(
                f"recovery=[{','.join(others)}]: experiment=ablate recovers models that have lost all their heads at"
                " once, and has no control; experiment=prune has these recoveries"
            )

    def __call__(self, study: Study) -> Findings:
        subject, splits, schedule = study.subject, study.splits, the_one(study.schedules)
        scoring = Scoring(subject, splits.score, study.seed, study.remember)
        with doing("score"):
            plans = plans_of(choices(scoring, study.scorers, schedule, self.removals(subject.grid)))
            heads = heads_table(scoring, study.scorers)
        with doing("prune"):
            pruning, _, difference = prune(subject, plans, splits)
        first, batch = [plan for plan in plans if plan.draw == 0], splits.report.first(self.latency_batch)
        with doing("time"):
            latency = time_removed(subject, first, batch, self.latency_rounds)
        pruning = with_times(pruning, latency)
        furthest = most_removed(summary_table(pruning, self.tolerance))["scorer"]
        chosen = [plan for plan in first if plan.scorer == furthest]
        recovered = recovered_table(study, chosen)
        curves = [pruning]
        if len(recovered):
            recovered = with_times(recovered, latency)
            curves += [rows for _, rows in recovered.groupby("recovery", sort=False)]
        summary = pd.concat([summary_table(curve, self.tolerance) for curve in curves], ignore_index=True)
        tables = {
            "summary": summary,
            "heads": heads,
            "pruning": pruning,
            **({"recovered": recovered} if len(recovered) else {}),
            "agreement": rank_agreement(heads),
            "latency": latency,
            **study.training_table,
            **shift_table(
                subject, splits, removed_most(study, chosen, summary[summary["scorer"] == furthest]), self.calibrated
            ),
        }
        return with_proofs(study, tables, difference)


def recovered_table(study: Study, plans: Sequence[Plan]) -> pd.DataFrame:
    """Prune by each plan and recover the model. Return rows as in `pruning`. The dense model is not recovered."""
    subject, splits = study.subject, study.splits
    rows = list[dict[str, Any]]()
    dense = measure(subject.without(HeadMask(subject.grid)), splits.choose)
    for name, recovery in track(study.recoveries.items(), "recover"):
        for plan in track(sorted(plans, key=lambda plan: len(plan.mask.removed)), name, name=plan_words):
            left, note = subject.without(plan.mask), ""
            if plan.mask.removed:
                left, _, note, _ = recover(recovery, study, left)
            columns = plan_columns(plan) | {"recovery": name} | accuracy_columns(measure(left, splits.report))
            columns |= choose_columns(measure(left, splits.choose), dense)
            rows.append(columns | size_columns(left, splits.report) | {"note": note})
    return pd.DataFrame(rows)


def removed_most(
    study: Study, plans: Sequence[Plan], summary: pd.DataFrame
) -> Iterator[tuple[dict[Any, Any], Subject]]:
    """Yield the model of each row of a summary, with the columns that identify it."""
    by_names = {removed_names(plan.mask): plan.mask for plan in plans}
    for row in summary[["scorer", "recovery", "heads_removed", "removed"]].to_dict("records"):
        model, name = study.subject.without(by_names[row.pop("removed") or ""]), row["recovery"]
        if name != NOTHING and row["heads_removed"]:
            model = recover(study.recoveries[name], study, model).model
        yield row, model


def with_times(table: pd.DataFrame, latency: pd.DataFrame) -> pd.DataFrame:
    """Add the measured times to the table; NaN for models that were not timed."""
    return table.merge(latency, how="left", on=[name for name in latency if name in table])


def summary_table(pruning: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """Return a row per scorer: the smallest model that loses at most `tolerance` of quality. Only draw 0 counts."""
    rows = []
    for name, curve in pruning[pruning["draw"] == 0].groupby("scorer", sort=False):
        dense = curve[curve["heads_removed"] == 0].iloc[0]
        recovery = curve["recovery"].iloc[0] if "recovery" in curve else NOTHING
        rows.append({"scorer": name, "recovery": recovery, **summary_of(curve, dense, tolerance)})
    return pd.DataFrame(rows)
