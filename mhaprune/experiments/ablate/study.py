"""Score every head, remove the weakest heads from the model, and measure the cost and the speed-up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import pandas as pd

from mhaprune.data import Data, Splits
from mhaprune.experiments.ablate import report
from mhaprune.experiments.base import Findings, HeadBudgets, Setup, WithinTolerance, the_one, with_proofs
from mhaprune.experiments.can_go import summary_of
from mhaprune.experiments.examples import shown_by
from mhaprune.heads import HeadMask
from mhaprune.measure.columns import accuracy_columns, choose_columns, size_columns
from mhaprune.measure.outcomes import measure
from mhaprune.progress import Stages, doing, track
from mhaprune.pruning.plans import Plan, choices, plan_columns, plan_words, plans_of
from mhaprune.pruning.removal import prune, time_removed
from mhaprune.recoveries.base import RecoveryContext, recover
from mhaprune.reporting.head_scores import head_scores
from mhaprune.reporting.shared_figures import agreement, compare_curves
from mhaprune.reporting.training import training_curve
from mhaprune.scorers.agreement import rank_agreement, with_reference
from mhaprune.scorers.scoring import Scoring, heads_table
from mhaprune.studies.study import Study, Trained
from mhaprune.subject import Subject
from mhaprune.tables import NOTHING, head_names

Recover = Callable[[HeadMask], tuple[Subject, str]]
"""A function that returns the model without these heads after a recovery, and a note if the recovery failed."""


@dataclass(frozen=True)
class Ablate(HeadBudgets, WithinTolerance):
    """Scorers × budgets: tables `summary`, `heads`, `pruning`, `agreement`, `latency` and `training`; `recovered`,
    models after a recovery (by default a refit); and `answers`, the answers of mhaprune's own model with fewer and
    fewer heads.

    For every scorer the summary names the largest budget that loses at most `tolerance` of exact match on the *choose*
    split, and the exact match at that budget on the *report* split. `heads_removed_sure` heads can be removed at 95 %
    confidence (see `can_go.py`). The first draw of a random scorer is treated like any other scorer. Its further draws
    are a control: only their accuracy is measured. A schedule that uses no scorer has a row under its own name.

    Only the models of one scorer are recovered, because a recovery takes longer than a measurement: the scorer that can
    remove the most heads without a recovery. Recovered models have rows of their own in the summary.
    """

    recovers = True
    tables = ("summary", "heads", "pruning", "recovered", "agreement", "latency", "answers", "training")
    figures = (report.accuracy_curves, head_scores, agreement, report.latency_curves, training_curve)
    figures_over_runs = (compare_curves,)
    stages: ClassVar[Stages] = {"score": 1, "prune": 5, "time": 5, "recover": 3, "prove": 0.3}
    say = staticmethod(report.say)
    headline = staticmethod(report.headline)
    head_map = staticmethod(report.head_map)

    def check(self, setup: Setup) -> None:
        the_one(setup.schedules)
        super().check(setup)
        setup.check_scorers()
        if others := [name for name, recovery in setup.recoveries.items() if recovery.between or recovery.control]:
            raise ValueError(
                f"recovery=[{','.join(others)}]: experiment=ablate recovers models that have lost all their heads at"
                " once, and has no control; experiment=prune does both"
            )

    def __call__(self, study: Study) -> Findings:
        subject, splits, schedule = study.subject, study.splits, the_one(study.schedules)
        scoring = Scoring(subject, splits.score, study.seed, study.remember)
        with doing("score"):
            plans = plans_of(choices(scoring, study.scorers, schedule, self.removals(subject.grid)))
            heads = heads_table(scoring, study.scorers)
        with doing("prune"):
            pruning, _, difference = prune(subject, plans, splits)
        first, batch = [plan for plan in plans if plan.draw == 0], splits.report[: self.latency_batch]
        with doing("time"):
            latency = time_removed(subject, first, batch, self.latency_rounds)
        pruning, alike, lesson = with_times(pruning, latency), rank_agreement(heads), study.lesson()
        summaries = [summary_table(pruning, alike, self.tolerance)]
        furthest = report.largest_budget(summaries[0])["scorer"]
        ways: dict[str, Recover] = {NOTHING: lambda mask: (subject.without(mask), "")}
        recovered = []
        with doing("recover", len(study.recoveries)) as step:
            for name in study.recoveries:
                ways[name] = partial(recover_without, study, lesson, name)
                if study.origin is not None:
                    ways[name] = cache(ways[name])  # called again for the answers
                mine = [plan for plan in first if plan.scorer == furthest]
                recovered.append(with_times(recovered_table(subject, splits, name, ways[name], mine), latency))
                summaries.append(summary_table(recovered[-1], alike, self.tolerance))
                step.advance()
        tables = {
            "summary": pd.concat(summaries, ignore_index=True),
            "heads": heads,
            "pruning": pruning,
            **({"recovered": pd.concat(recovered, ignore_index=True)} if recovered else {}),
            "agreement": alike,
            "latency": latency,
            **study.training_table,
        }
        if study.origin is not None:
            own = pruning[(pruning["scorer"] == furthest) & (pruning["draw"] == 0)]
            tables["answers"] = answers_table(study.origin, own, ways)
        return with_proofs(study, tables, difference)


def recover_without(study: Study, lesson: RecoveryContext, name: str, mask: HeadMask) -> tuple[Subject, str]:
    """Return the model without these heads after a recovery, and a note if the recovery failed. The dense model does
    not change."""
    left = study.subject.without(mask)
    if not mask.removed:
        return left, ""
    model, _, note = recover(study.recoveries[name], lesson, left, 0, study.remember)
    return model, note


def with_times(table: pd.DataFrame, latency: pd.DataFrame) -> pd.DataFrame:
    """Add the measured times to the table; NaN for models that were not timed."""
    return table.merge(latency, how="left", on=[name for name in latency if name in table])


def recovered_table(
    subject: Subject, splits: Splits[Data], name: str, recovered: Recover, plans: Sequence[Plan]
) -> pd.DataFrame:
    """Return rows like those of `pruning` for the models of these plans after the named recovery."""
    rows = []
    dense = measure(subject.without(HeadMask(subject.grid)), splits.choose)
    for plan in track(plans, name, name=plan_words):
        model, note = recovered(plan.mask)
        columns = plan_columns(plan) | {"recovery": name} | accuracy_columns(measure(model, splits.report))
        columns |= choose_columns(measure(model, splits.choose), dense)
        rows.append(columns | size_columns(model, splits.report) | {"note": note})
    return pd.DataFrame(rows)


def summary_table(pruning: pd.DataFrame, agreement: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """Return a row per scorer: the largest budget within `tolerance` of the dense quality. Only first draws count."""
    rows = []
    for name, curve in pruning[pruning["draw"] == 0].groupby("scorer", sort=False):
        dense = curve[curve["heads_removed"] == 0].iloc[0]
        recovery = curve["recovery"].iloc[0] if "recovery" in curve else NOTHING
        rho = {"spearman_with_ablation": with_reference(agreement, name)}
        rows.append({"scorer": name, "recovery": recovery, **summary_of(curve, dense, tolerance), **rho})
    return pd.DataFrame(rows)


def answers_table(trained: Trained, pruned: pd.DataFrame, ways: Mapping[str, Recover]) -> pd.DataFrame:
    """Return one row per function of `ways` (see `Recover`) and row of `pruned`: the model's greedy answer to the first
    example of the report split, beside the right answer."""
    grid, rows = trained.network.grid, []
    for way, without in ways.items():
        for _, row in pruned.sort_values("heads_removed").iterrows():
            left: Any = without(HeadMask(grid).without(*head_names(row["removed"])))[0]
            [shown] = shown_by(left, trained, [0])
            said = {"source": shown.source, "answer": shown.answer, "right_answer": shown.right}
            what = {"scorer": row["scorer"], "recovery": way, "heads_total": len(grid)}
            rows.append({**what, "heads_removed": int(row["heads_removed"]), **said})
    return pd.DataFrame(rows)
