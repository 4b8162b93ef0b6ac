"""Score every head, remove the weakest for real, and measure what that costs and brings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from typing import Any, ClassVar

import pandas as pd

from mhaprune.data import Data, Splits
from mhaprune.experiments.ablate import words
from mhaprune.experiments.ablate.figures import accuracy_curves, answers, latency_curves
from mhaprune.experiments.base import Findings, Setup, WithinTolerance, the_one
from mhaprune.experiments.can_go import within_tolerance
from mhaprune.experiments.examples import show
from mhaprune.heads import HeadId, HeadMask
from mhaprune.measure.columns import accuracy_columns, choose_columns, size_columns
from mhaprune.measure.outcomes import measure
from mhaprune.progress import Stages, doing, track
from mhaprune.pruning.plans import Plan, choices, plan_columns, plan_words, plans_of
from mhaprune.pruning.removal import proofs, prune, time_removed
from mhaprune.recoveries.base import recover
from mhaprune.reporting.head_scores import head_scores
from mhaprune.reporting.plots import Figures
from mhaprune.reporting.shared_figures import agreement, compare_curves
from mhaprune.reporting.training import training_curve
from mhaprune.schedules.base import Schedule
from mhaprune.schedules.budgets import check_budgets, heads_to_remove, removing
from mhaprune.scorers.agreement import rank_agreement, spearman, with_reference
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.scoring import Scoring, heads_table
from mhaprune.studies.study import Study, Trained
from mhaprune.subject import Subject
from mhaprune.tables import (
    CHOOSE_DROP,
    CHOOSE_QUALITY,
    ENDS,
    GATE,
    INITIAL_GATE,
    NOTHING,
    QUALITY,
    QUARTILES,
    SURE,
    head_names,
)

Recover = Callable[[HeadMask], tuple[Subject, str]]
"""Returns the model without these heads, recovered; and where that failed, what happened."""


@dataclass(frozen=True)
class Ablate(WithinTolerance):
    """Scorers × budgets: tables `summary`, `heads`, `pruning`, `agreement`, `latency` and `training`; `recovered`, by
    default what a refit brings back; and `answers`, what our own model says with fewer and fewer heads.

    For every scorer the summary names the largest budget that loses at most `tolerance` of exact match on the *choose*
    split, and the exact match at that budget on the *report* split. `heads_removed_sure` is how many heads can go
    surely, at 95 % confidence (see `mhaprune.experiments.can_go`). The first draw of a random scorer is treated like
    any other scorer. Its further draws are a control: only their accuracy is measured. A schedule that uses no scorer
    has a row under its own name.

    The models of one scorer are recovered, because a recovery takes longer than a measurement: of the one whose heads
    can go furthest as they are. They have rows of their own in the summary.
    """

    budgets: tuple[int | float, ...] = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
    """How many heads to remove: shares of all heads (0.25) or numbers of heads (6)."""

    recovers: ClassVar[bool] = True
    tables: ClassVar[tuple[str, ...]] = (
        "summary",
        "heads",
        "pruning",
        "recovered",
        "agreement",
        "latency",
        "answers",
        "training",
    )
    figures: ClassVar[Figures] = (accuracy_curves, answers, head_scores, agreement, latency_curves, training_curve)
    figures_over_runs: ClassVar[Figures] = (compare_curves,)
    stages: ClassVar[Stages] = {"score": 1, "prune": 5, "time": 5, "recover": 3, "prove": 0.3}
    say = staticmethod(words.say)
    headline = staticmethod(words.headline)
    head_map = staticmethod(words.head_map)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budgets(self.budgets)

    def check(self, setup: Setup) -> None:
        schedule = the_one(setup.schedules)
        heads_to_remove(self.budgets, len(setup.grid), len(schedule.smallest(setup.grid).removed))
        if not setup.scorers:
            raise ValueError("scorer=[]: must name at least one scorer, for example scorer=[ablation]")
        if others := [name for name, recovery in setup.recoveries.items() if recovery.between or recovery.control]:
            raise ValueError(
                f"recovery=[{','.join(others)}]: experiment=ablate recovers models that have lost all their heads at"
                " once, and has no control; experiment=prune does both"
            )

    def __call__(self, study: Study) -> Findings:
        lesson = study.lesson()

        def recovered(name: str, mask: HeadMask) -> tuple[Subject, str]:
            model, _, note = recover(study.recoveries[name], lesson, study.subject.without(mask), 0, study.remember)
            return model, note

        scoring = Scoring(study.subject, study.splits.score, study.seed, study.remember)
        recoveries: dict[str, Recover] = {name: partial(recovered, name) for name in study.recoveries}
        findings = self.study(scoring, study.splits, study.scorers, the_one(study.schedules), recoveries)
        agreement = [findings.tables["agreement"], initial_gates(study.history)]
        findings.tables["agreement"] = pd.concat(agreement, ignore_index=True)
        findings.tables.update(study.training_table)
        if study.origin is not None:
            models: dict[str, Any] = {NOTHING: study.subject.without}
            models |= {name: lambda mask, name=name: recoveries[name](mask)[0] for name in recoveries}
            furthest = words.largest_budget(words.as_they_are(findings.tables["summary"]))["scorer"]
            pruning = findings.tables["pruning"]
            own = pruning[(pruning["scorer"] == furthest) & (pruning["draw"] == 0)]
            findings.tables["answers"] = answers_table(study.origin, own, models)
        with doing("prove"):
            findings.checks.update(proofs(study.subject, study.splits.report))
        return findings

    def study(
        self,
        scoring: Scoring,
        splits: Splits[Data],
        scorers: Mapping[str, Scorer],
        schedule: Schedule,
        recoveries: Mapping[str, Recover],
    ) -> Findings:
        """Study any subject: nothing here knows where the model came from."""
        subject, report = scoring.subject, splits.report
        budgets = removing(heads_to_remove(self.budgets, len(subject.grid)), subject.grid)
        with doing("score"):
            plans = plans_of(choices(scoring, scorers, schedule, budgets))
            heads = heads_table(scoring, scorers)
        with doing("prune"):
            pruning, _, difference = prune(subject, plans, splits)
        with doing("time"):
            latency = time_removed(
                subject, [plan for plan in plans if plan.draw == 0], report[: self.latency_batch], self.latency_rounds
            )
        pruning = with_times(pruning, latency)
        alike = rank_agreement(heads)
        summary = summary_table(pruning, alike, self.tolerance)
        furthest = words.largest_budget(summary)["scorer"]
        mine = [plan for plan in plans if (plan.scorer, plan.draw) == (furthest, 0)]
        with doing("recover", len(recoveries)) as step:
            recovered = []
            for name, each in recoveries.items():
                recovered.append(with_times(recovered_table(subject, splits, name, each, mine), latency))
                step.advance()
        summaries = [summary, *(summary_table(table, alike, self.tolerance) for table in recovered)]
        tables = {
            "summary": pd.concat(summaries, ignore_index=True),
            "heads": heads,
            "pruning": pruning,
            **({"recovered": pd.concat(recovered, ignore_index=True)} if recovered else {}),
            "agreement": alike,
            "latency": latency,
        }
        return Findings(tables, {"max_difference_masked_removed": difference})


def with_times(table: pd.DataFrame, latency: pd.DataFrame) -> pd.DataFrame:
    """The table with the times of its models where they were taken."""
    return table.merge(latency, how="left", on=[name for name in latency if name in table])


def recovered_table(
    subject: Subject, splits: Splits[Data], name: str, recovered: Recover, plans: Sequence[Plan]
) -> pd.DataFrame:
    """The rows of `pruning` for these plans after the recovery of that name. The dense model stays as it is."""
    rows = []
    dense = measure(subject.without(HeadMask(subject.grid)), splits.choose)
    for plan in track(plans, name, name=plan_words):
        model, note = recovered(plan.mask) if plan.mask.removed else (subject.without(plan.mask), "")
        columns = plan_columns(plan) | {"recovery": name} | accuracy_columns(measure(model, splits.report))
        columns |= choose_columns(measure(model, splits.choose), dense)
        rows.append(columns | size_columns(model, splits.report) | {"note": note})
    return pd.DataFrame(rows)


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
        best, sure = within_tolerance(curve, dense, tolerance)
        rows.append(
            {
                "scorer": name,
                "recovery": best.get("recovery", NOTHING),
                "tolerance": tolerance,
                "heads_total": best["heads_total"],
                "heads_removed": best["heads_removed"],
                SURE: sure,
                "removed": best["removed"],
                CHOOSE_QUALITY: best[CHOOSE_QUALITY],
                **{f"{CHOOSE_DROP}{end}": best[f"{CHOOSE_DROP}{end}"] for end in ENDS},
                "dense_quality": dense[QUALITY],
                **{f"{QUALITY}{end}": best[f"{QUALITY}{end}"] for end in ENDS},
                **{f"speedup{end}": best[f"speedup{end}"] for end in QUARTILES},
                "spearman_with_ablation": with_reference(agreement, name),
            }
        )
    return pd.DataFrame(rows)


def answers_table(
    trained: Trained, pruned: pd.DataFrame, models: Mapping[str, Callable[[HeadMask], Any]]
) -> pd.DataFrame:
    """One row per way of `models`, from a mask to the model without these heads, and row of `pruned`: the answer to
    the first example of the report split, decoded greedily, beside the right one."""
    decode, report = trained.task.vocabulary.decode, trained.splits.report
    source, right = decode(report.source[0].tolist()), decode(report.target[0].tolist())
    grid, rows = trained.network.grid, []
    for way, model in models.items():
        for _, row in pruned.sort_values("heads_removed").iterrows():
            mask = HeadMask(grid).without(*(HeadId(*name) for name in head_names(row["removed"])))
            # a recovery leaves the dense model as it is
            left = model(mask) if mask.removed else models[NOTHING](mask)
            shown = show(left, trained.task, source, right)
            said = {"source": shown.source, "answer": shown.answer, "right_answer": shown.right}
            what = {"scorer": row["scorer"], "recovery": way, "heads_total": len(grid)}
            rows.append({**what, "heads_removed": int(row["heads_removed"]), **said})
    return pd.DataFrame(rows)
