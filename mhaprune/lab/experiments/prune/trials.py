"""Pruned models and their recovery: at the end, between one removal and the next, or trained anew as a control."""

from collections.abc import Callable, Iterator, Sequence
from math import nan
from typing import Any, NamedTuple

import pandas as pd

from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.measure.accuracy import calibration_columns, choose_columns, size_columns, worst_columns
from mhaprune.measure.outcomes import measure
from mhaprune.progress import track
from mhaprune.pruning.plans import Plan, plan_columns, plan_words
from mhaprune.pruning.pruned import EquivalenceCheck
from mhaprune.recoveries.base import recover
from mhaprune.subject import Subject
from mhaprune.tables import NOTHING, join_names

WAY = ["schedule", "scorer", "recovery"]
"""The columns that, with the number of heads, identify a model; a control also needs `draw`."""


class Trial(NamedTuple):
    """A model without the heads of a plan, recovered or not, and its row of the table `recovery`.

    `plan.mask` is a mask of the dense model. The column `steps` counts training after pruning; for a control trained
    from scratch, all of its training.
    """

    plan: Plan
    model: Subject
    columns: dict[str, Any]


class Trials:
    """Prunes one dense model by plans and recovers it.

    Equal masks are recovered and measured once. Recovered models are kept in the cache, so an interrupted run continues
    where it stopped.
    """

    def __init__(self, study: Study) -> None:
        self.study, self.recoveries = study, study.recoveries
        self.histories: list[pd.DataFrame] = []
        self.worst = 0.0
        dense = study.subject.without(HeadMask(study.subject.grid))
        self._dense, self._reported = (measure(dense, split) for split in (study.splits.choose, study.splits.report))
        self._done: dict[tuple[str, HeadMask], Trial] = {}

    def after(self, plans: Sequence[Plan]) -> Iterator[Trial]:
        """Yield, for each plan, the pruned model without recovery, then after each recovery that acts at the end."""
        dense, equivalence = self.study.subject, EquivalenceCheck(self.study.subject, self.study.splits.proof)
        ends = [name for name, each in self.recoveries.items() if each.follows]
        for plan in track(plans, "plan", name=plan_words):
            equivalence.prove(plan.mask)
            self.worst = max(self.worst, equivalence.worst)
            for name in (NOTHING, *ends):
                trial = self._done.get((name, plan.mask))
                if trial is None:
                    steps = 0 if name == NOTHING else self.recoveries[name].extra_steps
                    trial = self._recovered(plan, name, dense.without(plan.mask), 0, steps)
                    self._done[name, plan.mask] = trial
                yield trial._replace(plan=plan, columns=trial.columns | _identity(plan, name, 0))

    def between(self, name: str, choose: Callable[[Subject, int], Plan], budgets: Sequence[int]) -> Iterator[Trial]:
        """Yield the model at each budget, a number of heads removed in all: `choose` returns the next heads to remove
        from the current model, and the smaller model is recovered before the next budget."""
        dense, steps, seconds = self.study.subject, 0, 0.0
        pruned: Subject = dense
        for budget in track(budgets, name, name=str):
            plan = choose(pruned, budget)
            equivalence = EquivalenceCheck(pruned, self.study.splits.proof)
            equivalence.prove(plan.mask)
            self.worst = max(self.worst, equivalence.worst)
            smaller = pruned.without(plan.mask)
            in_all = self._with_all_lost(plan, smaller)
            steps += self.recoveries[name].extra_steps if in_all.mask.removed else 0
            done = self._recovered(in_all, name if in_all.mask.removed else NOTHING, smaller, 0, steps)
            seconds += done.columns["seconds"]
            yield done._replace(columns=done.columns | _identity(in_all, name, 0) | {"seconds": seconds})
            pruned = done.model

    def controls(self, name: str, best: Sequence[Trial]) -> Iterator[Trial]:
        """Yield controls: models with the heads of the models `best`, trained from new weights."""
        steps = self.study.training.steps + self.study.extra_steps
        work = [(trial, draw) for trial in best for draw in range(self.recoveries[name].draws)]
        for trial, draw in track(work, name, name=lambda each: plan_words(each[0].plan)):
            pruned = self.study.subject.without(trial.plan.mask)
            yield self._recovered(trial.plan, name, pruned, draw, steps)

    def _recovered(self, plan: Plan, name: str, pruned: Subject, draw: int, steps: int) -> Trial:
        splits, note, seconds, identity = self.study.splits, "", 0.0, _identity(plan, name, draw)
        if name != NOTHING:
            pruned, history, note, seconds = recover(self.recoveries[name], self.study, pruned, draw)
            where = {column: identity[column] for column in (*WAY, "draw")}
            self.histories.append(history.assign(heads_kept=len(pruned.grid), **where))
        reported = measure(pruned, splits.report)
        control = name != NOTHING and self.recoveries[name].control
        columns = identity | {"control": control, "steps": steps, "seconds": seconds}
        columns |= worst_columns(reported, self._reported, splits.report)
        columns |= calibration_columns(pruned, splits.report, reported)
        columns |= choose_columns(measure(pruned, splits.choose), self._dense, splits.choose)
        columns |= size_columns(pruned, splits.report) | {"note": note}
        if control and note:  # if the control failed, the model kept its old weights
            columns |= {name: nan for name, value in columns.items() if isinstance(value, float)}
        return Trial(plan, pruned, columns)

    def _with_all_lost(self, plan: Plan, pruned: Subject) -> Plan:
        """Return the plan with the mask of all heads of the dense model that `pruned` does not have."""
        grid = self.study.subject.grid
        return plan._replace(mask=HeadMask(grid, frozenset(grid) - frozenset(pruned.grid)))


def _identity(plan: Plan, recovery: str, draw: int) -> dict[str, Any]:
    columns = plan_columns(plan)
    where = {"schedule": plan.schedule, "scorer": plan.scorer, "recovery": recovery, "draw": draw}
    return where | {"kept": join_names(plan.mask.kept)} | {name: columns[name] for name in columns if name not in where}
