"""Prune by schedules and scores, recover the pruned models, and find how few heads are enough."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import Any

import pandas as pd

from mhaprune.inputs import Study
from mhaprune.lab.experiments.base import Findings, HeadBudgets, Setup, WithinTolerance, with_proofs
from mhaprune.lab.experiments.prune import prune_report as report
from mhaprune.lab.experiments.prune.trials import WAY, Trial, Trials
from mhaprune.lab.experiments.shift import groups_of, shift_quality, shift_table
from mhaprune.lab.experiments.tolerance import summary_of
from mhaprune.lab.reporting.plots import appendix
from mhaprune.lab.reporting.training_curves import training_curve
from mhaprune.progress import doing, track
from mhaprune.pruning.plans import Plan, choices, plans_of
from mhaprune.pruning.pruned import time_removed
from mhaprune.recoveries.base import pruned_digest
from mhaprune.scorers.scoring import Scoring
from mhaprune.storage.cache import Make
from mhaprune.subject import Subject
from mhaprune.tables import (
    BEST_OF_SIZE,
    CHOOSE_DROP,
    CHOOSE_MOST,
    CHOOSE_QUALITY,
    DENSE_QUALITY,
    NOTHING,
    QUALITY,
    QUARTILES,
)

SHOWN = [*WAY, "heads_removed"]
"""The columns that identify a model in the table `shift`."""


@dataclass(frozen=True)
class Prune(HeadBudgets, WithinTolerance):
    """Schedules × scorers × recoveries × budgets: tables `smallest`, `recovery`, `latency`,
    `recovery_training` and `training`. `models/` has the model of each row of `smallest` that has lost heads, except
    controls.

    Each row of `smallest` has, for a schedule, a scorer and a recovery, the smallest model that loses at most
    `tolerance` of the dense exact match on the *choose* split, and its exact match on the *report* split.
    `shift` has these models on examples of other kinds, if the task or `shift` has any.
    `heads_removed_sure` heads can be removed at 95 % confidence (`tolerance.py`). A control recovery trains, from new
    weights, the best shape of each number of heads kept. Its row stands for several draws, so this row has no
    `heads_removed_sure`.
    """

    budgets: tuple[int | float, ...] = (0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
    """Numbers of heads to remove: shares of all heads (0.25) or numbers of heads (6)."""

    recovers = measures_shift = True
    question = "How few heads are enough?"
    then = "`model_file=` with a file of `models/` in this folder studies a pruned model with any experiment."
    steps = ("model", "prune and recover", "controls", "time", "other examples", "prove", "figures and page")
    seconds = (17, 90, 500, 2, 4, 0.1, 1)
    figures = (report.recovery_curves, report.worth, shift_quality, appendix(training_curve))
    say = staticmethod(report.say)
    headline = staticmethod(report.headline)
    head_map = staticmethod(report.head_map)

    def check(self, setup: Setup) -> None:
        if not setup.schedules:
            raise ValueError("schedule=[]: must name at least one schedule, for example schedule=[greedy]")
        if any(schedule.scoring != "none" for schedule in setup.schedules.values()):
            setup.check_scorers()
        super().check(setup)

    def __call__(self, study: Study) -> Findings:
        subject, splits = study.subject, study.splits
        budgets = self.removals(subject.grid)
        steps = [each.extra_steps * (len(budgets) - 1 if each.between else 1) for each in study.recoveries.values()]
        trials = Trials(replace(study, extra_steps=study.extra_steps + max(steps, default=0)))
        scoring = Scoring(subject, splits.score, study.seed, study.remember)
        tried: list[Trial] = []
        for name, schedule in track(study.schedules.items(), "prune and recover", name=lambda each: each[0]):
            plans = plans_of(choices(scoring, study.scorers, schedule, budgets, name, draws=1))
            tried += trials.after(plans)
            for between in (n for n, recovery in study.recoveries.items() if recovery.between):
                for scorer in dict.fromkeys(plan.scorer for plan in plans):
                    choose = partial(choose_next, study, scorer, name)
                    tried += trials.between(between, choose, budgets)
        best = best_of_each_size(tried)
        for name in track([n for n, recovery in study.recoveries.items() if recovery.control], "controls"):
            tried += trials.controls(name, best)
        table = pd.DataFrame([trial.columns for trial in tried])
        with doing("time"):
            plans = list({trial.plan.mask: trial.plan for trial in tried}.values())
            latency = time_removed(subject, plans, splits.report.first(self.latency_batch), self.latency_rounds)
        smallest = smallest_table(table, latency, self.tolerance)
        chosen = list(models_of(tried, smallest))
        tables = {
            "smallest": smallest,
            "recovery": table,
            "latency": latency,
            **shift_table(
                *(subject, splits, groups_of(study)),
                (({name: row[name] for name in SHOWN}, trial.model) for row, trial in chosen),
            ),
            "recovery_training": pd.concat(trials.histories) if trials.histories else pd.DataFrame(),
            **study.training_table,
        }
        tables = {name: frame for name, frame in tables.items() if len(frame)}
        return with_proofs(study, tables, trials.worst, saved_files(study, chosen))


def choose_next(study: Study, scorer: str, name: str, pruned: Subject, budget: int) -> Plan:
    """Return a plan with the next heads to remove from the model `left`, chosen anew by the schedule `name`. With them
    the model has lost as many heads as `budget` says."""

    def remember(kind: str, what: dict[str, Any], make: Make) -> dict[str, Any]:
        return study.remember(kind, what | {"left": pruned_digest(pruned)}, make)

    scorers = {scorer: study.scorers[scorer]} if scorer in study.scorers else {}
    scoring, schedule = Scoring(pruned, study.splits.score, study.seed, remember), study.schedules[name]
    grid = study.subject.grid
    more = budget - (len(grid) - len(pruned.grid))
    (plan,) = plans_of(choices(scoring, scorers, schedule, [more], name, draws=1, whole=grid))
    return plan


def best_of_each_size(trials: Sequence[Trial]) -> list[Trial]:
    """Return the best pruned model on the choose split for each number of heads kept."""
    best: dict[int, Trial] = {}
    for trial in trials:
        if trial.plan.mask.removed:
            kept = len(trial.plan.mask.kept)
            pair = (best.get(kept, trial), trial)
            best[kept] = max(pair, key=lambda each: (each.columns[CHOOSE_QUALITY], -each.columns["choose_loss"]))
    return list(best.values())


def smallest_table(table: pd.DataFrame, latency: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """Return one row per schedule, scorer and recovery: the smallest model within `tolerance` of the dense exact match,
    and the quality of the control with as many heads. The control also has its own row, with means over its draws."""
    speeds = latency.loc[latency["removed"].notna(), ["removed", *(f"speedup{q}" for q in QUARTILES)]]
    table = table.merge(speeds, how="left", on="removed")
    dense = table[(table["recovery"] == NOTHING) & (table["heads_removed"] == 0)].iloc[0]
    controls = table[table["control"]]
    controls = controls[controls["recovery"] == controls["recovery"].min()]  # one of several stands beside the rows
    rows = []
    for way, curve in _ways(table):
        row = summary_of(curve, dense, tolerance, "heads_kept", "kept", "steps", "note")
        control = _beside(controls[controls["heads_kept"] == row["heads_kept"]], row[DENSE_QUALITY])
        beside = {"quality": control.mean(), "least": control.min(), "most": control.max(), "draws": len(control)}
        row |= {"control": bool(curve["control"].any()), **{f"control_{name}": x for name, x in beside.items()}}
        rows.append(dict(zip(WAY, way, strict=True)) | row)
    return pd.DataFrame(rows)


def _ways(table: pd.DataFrame) -> Iterator[tuple[Any, pd.DataFrame]]:
    yield from table[~table["control"]].groupby(WAY, sort=False)
    for recovery, rows in table[table["control"]].groupby("recovery", sort=False):
        exact = [f"{split}quality" for split in ("", "choose_")]
        dense = rows.groupby("heads_kept")[DENSE_QUALITY].transform("first") if DENSE_QUALITY in rows else nan
        rows = rows.assign(**{QUALITY: _beside(rows, dense)})
        means = rows.groupby("heads_kept", sort=False)[[*exact, CHOOSE_DROP]].transform("mean")
        # The interval of one draw is not valid for the mean.
        blank = {f"{name}{end}": nan for name in (QUALITY, CHOOSE_DROP) for end in ("_low", "_high")} | {
            CHOOSE_MOST: nan
        }
        yield (BEST_OF_SIZE, BEST_OF_SIZE, recovery), rows.assign(**means, **blank).drop_duplicates("heads_kept")


def _beside(rows: pd.DataFrame, dense: Any) -> pd.Series:
    """Return the quality of each row. If rows are of several kinds of examples, it is `dense` and the change from the
    whole model on the kind of the row."""
    return dense + rows[QUALITY] - rows[DENSE_QUALITY] if DENSE_QUALITY in rows else rows[QUALITY]


def models_of(trials: Sequence[Trial], smallest: pd.DataFrame) -> Iterator[tuple[dict[Any, Any], Trial]]:
    """Yield each row of `smallest` that has lost heads and is no control, with its model."""
    recovered = [trial for trial in trials if not trial.columns["control"]]
    models = {(*(trial.columns[name] for name in WAY), trial.columns["heads_removed"]): trial for trial in recovered}
    for row in smallest[(smallest["heads_removed"] > 0) & ~smallest["control"]].to_dict("records"):
        yield row, models[*(row[name] for name in WAY), row["heads_removed"]]


def saved_files(study: Study, chosen: Sequence[tuple[dict[Any, Any], Trial]]) -> dict[str, bytes]:
    """Return the files of saved models."""
    files: dict[str, bytes] = {}
    for row, trial in chosen:
        name = "-".join([*dict.fromkeys(row[name] for name in WAY), str(row["heads_kept"])])
        files |= study.saved(f"models/{name}", trial.model, trial.columns["steps"])
    return files
