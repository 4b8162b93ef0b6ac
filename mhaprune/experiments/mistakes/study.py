"""Make common mistakes on purpose, and measure what each of them costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import pandas as pd
from torch import Tensor

from mhaprune.experiments.base import Experiment, Findings, Setup, the_one
from mhaprune.experiments.mistakes import words
from mhaprune.experiments.mistakes.figures import compare_costs, costs_by_budget
from mhaprune.experiments.mistakes.mistakes import GRADIENT_MISTAKES, RIGHT, WHAT
from mhaprune.experiments.mistakes.words import RANDOM_GATES
from mhaprune.model.gates import Softmax
from mhaprune.model.transformer import Seq2Seq
from mhaprune.progress import Stages, doing, track
from mhaprune.pruning.plans import choices, plans_of
from mhaprune.pruning.removal import proofs, prune
from mhaprune.reporting.plots import Figures
from mhaprune.reporting.training_figure import training_curve
from mhaprune.schedules.budgets import check_budgets, heads_to_remove, removing, with_a_choice
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.gate import Gate
from mhaprune.scorers.scoring import Scoring
from mhaprune.settings.options import option_name
from mhaprune.statistics.rankings import spearman
from mhaprune.studies.study import Study
from mhaprune.tables import QUALITY, REFERENCE


@dataclass(frozen=True)
class Mistakes(Experiment):
    """What common mistakes in scoring heads cost: tables `mistakes`, `mistake_pruning` and `training`, and `retraining`
    of a second model.

    The cost of a mistake is the exact match on the report split after pruning by the right score minus that after
    pruning by the wrong one, in percentage points, mean over the budgets.
    """

    budgets: tuple[int | float, ...] = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
    """How many heads to remove: shares of all heads (0.25) or numbers of heads (6)."""
    retrain: bool = True
    """Whether to train a second model whose gates start otherwise, for the mistake `random_gate_init`. Without softmax
    gates there is no such mistake."""

    needs_training: ClassVar[bool] = True
    tables: ClassVar[tuple[str, ...]] = ("mistakes", "mistake_pruning", "retraining", "training")
    figures: ClassVar[Figures] = (costs_by_budget, training_curve)
    figures_over_runs: ClassVar[Figures] = (compare_costs,)
    stages: ClassVar[Stages] = {"score and prune": 2, "train again": 17, "score both": 3, "prove": 0.4}
    say = staticmethod(words.say)
    headline = staticmethod(words.headline)
    say_in_common = staticmethod(words.over_runs)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budgets(self.budgets)

    def check(self, setup: Setup) -> None:
        grid, schedule = setup.grid, the_one(setup.schedules)
        if setup.scorers:
            raise ValueError(f"scorer=[{','.join(setup.scorers)}]: must be [], this experiment brings its own scores")
        if schedule.scoring != "once":
            raise ValueError(f"schedule={option_name(schedule)}: must score the heads once, one_shot does")
        heads_to_remove(self.budgets, len(grid), len(schedule.smallest(grid).removed))
        with_a_choice(self.budgets, len(grid))

    def __call__(self, study: Study) -> Findings:
        trained, network = study.trained, study.trained.network
        with doing("score and prune"):
            chosen = self._choose(study, network, {"right": RIGHT, **GRADIENT_MISTAKES})
        costs = [cost_table(name, chosen.quality["right"], chosen.quality[name]) for name in GRADIENT_MISTAKES]
        rho = {name: chosen.spearman("right", name) for name in GRADIENT_MISTAKES}
        difference, tables = chosen.difference, dict[str, pd.DataFrame]()
        if self.retrain and isinstance(trained.gate, Softmax) and network.learned_gates() is not None:
            other: Any = "rand" if trained.gate.init == "zeros" else "zeros"
            with doing("train again", 1):
                retrained, tables["retraining"] = trained.retrain(replace(trained.gate, init=other))
            gate_and_ablation = {"gate": Gate(), REFERENCE: Ablation()}
            models = {trained.gate.init: network, other: retrained}
            right, wrong = (
                self._choose(study, models[start], gate_and_ablation)
                for start in track(("zeros", "rand"), "score both", name=str)
            )
            handicap = right.quality[REFERENCE] - wrong.quality[REFERENCE]
            costs.append(cost_table(RANDOM_GATES, right.quality["gate"], wrong.quality["gate"], handicap))
            rho[RANDOM_GATES] = wrong.spearman("gate", REFERENCE)
            difference = max(difference, right.difference, wrong.difference)
        pruning = pd.concat(costs, ignore_index=True)
        tables |= {"mistakes": mistakes_table(pruning, rho), "mistake_pruning": pruning, **study.training_table}
        with doing("prove"):
            checks = {"max_difference_masked_removed": difference, **proofs(network, study.splits.report)}
        return Findings(tables, checks)

    def _choose(self, study: Study, subject: Seq2Seq, scorers: Mapping[str, Scorer]) -> Chosen:
        scoring = Scoring(subject, study.splits.score, study.seed)
        budgets = removing(with_a_choice(self.budgets, len(subject.grid)), subject.grid)
        plans = plans_of(choices(scoring, scorers, the_one(study.schedules), budgets))
        pruned = prune(subject, plans, study.splits)
        quality = pruned.table.pivot_table(index=["heads_total", "heads_removed"], columns="scorer", values=QUALITY)
        scores = {name: scoring(name, scorer).scores.values[0] for name, scorer in scorers.items()}
        return Chosen(quality, scores, pruned.difference)


class Chosen(NamedTuple):
    """What several scorers choose on one model."""

    quality: pd.DataFrame
    """Exact match on the report split: a row per budget, a column per scorer."""
    scores: Mapping[str, Tensor]
    """The scores (N,) of every scorer."""
    difference: float
    """The largest difference of a logit between a removed model and the masked one."""

    def spearman(self, first: str, second: str) -> float:
        return spearman(self.scores[first].tolist(), self.scores[second].tolist())


def cost_table(mistake: str, right: pd.Series, wrong: pd.Series, handicap: pd.Series | float = 0.0) -> pd.DataFrame:
    """One row per budget: exact match by the right and the wrong scores, and their difference as the cost.

    Where the wrong scores are those of another model, `handicap` is what ablation loses there too. It does not count.
    """
    columns = {f"right_{QUALITY}": right, f"wrong_{QUALITY}": wrong, "handicap": handicap}
    table = pd.DataFrame(columns, index=right.index).reset_index()
    table.insert(0, "mistake", mistake)
    return table.assign(cost_points=100 * (right - wrong - handicap).to_numpy())


def mistakes_table(pruning: pd.DataFrame, rho: Mapping[str, float]) -> pd.DataFrame:
    """One row per mistake: what it is, its mean cost over the budgets, and Spearman's correlation of its scores with
    the right ones; for random gates that of the gates with ablation."""
    mean = pruning.groupby("mistake", sort=False)["cost_points"].mean()
    table = mean.reset_index().assign(budgets=pruning["heads_removed"].nunique())
    table.insert(1, "what", table["mistake"].map(WHAT))
    return table.assign(spearman=table["mistake"].map(rho))
