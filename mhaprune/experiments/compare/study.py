"""Compare all scores and searches on one model with the best subset of heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch

from mhaprune.experiments.base import Findings, HeadBudgets, Setup
from mhaprune.experiments.compare import report
from mhaprune.experiments.compare.regret import Regrets
from mhaprune.experiments.compare.report import passes
from mhaprune.measure.outcomes import measure_removed
from mhaprune.progress import Stages, doing, track
from mhaprune.pruning.oracle import OBJECTIVES, find_best, most_heads_for
from mhaprune.pruning.plans import COSTS, Choice, Plan, choices
from mhaprune.pruning.removal import proofs, prune
from mhaprune.reporting.head_scores import head_scores
from mhaprune.reporting.shared_figures import compare_curves
from mhaprune.reporting.training import training_curve
from mhaprune.schedules.base import Schedule
from mhaprune.schedules.budgets import Budget, heads_to_remove, removing, with_a_choice
from mhaprune.scorers.agreement import rank_agreement, spearman, with_reference
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.gate_training import TrainedGates
from mhaprune.scorers.scoring import Scoring, heads_table
from mhaprune.settings.ranges import Ge
from mhaprune.statistics.intervals import CONFIDENCE, difference_interval, holm, prunable, sign_flip_p, with_interval
from mhaprune.studies.study import Study
from mhaprune.tables import CHOOSE_QUALITY, MOMENTS, QUALITY, REFERENCE, UNINFORMED


def contestants(
    scoring: Scoring, scorers: Mapping[str, Scorer], schedules: Mapping[str, Schedule], budgets: Sequence[Budget]
) -> dict[str, Choice]:
    """Return the choices of heads by name; their plans have the same name. The name is the scorer for the first
    schedule that uses it, and `scorer + schedule` for each later schedule."""
    found: dict[str, Choice] = {}
    for how, schedule in track(schedules.items(), "schedule"):
        for choice in choices(scoring, scorers, schedule, budgets, how):
            name = f"{choice.scorer} + {how}" if choice.scorer in found else choice.scorer
            found[name] = choice._replace(plans=[plan._replace(scorer=name) for plan in choice.plans])
    return found


@dataclass(frozen=True)
class Compare(HeadBudgets):
    """Scorers, searches × budgets × oracle: tables `winner`, `methods`, `heads`, `pruning`, `oracle`, `agreement` and
    `training`.

    A schedule that uses no scores is a search, and competes with the scorers under its own name. The oracle is the best
    subset of heads on the *choose* split. Regret is how much worse a chosen subset is than the oracle on the *report*
    split. A head is prunable if its ablation costs less than `tolerance_nats`, at 95 % confidence for all such heads
    together.
    """

    oracle: Literal["auto", "exact", "beam"] = "auto"
    """Which subsets compete to be the best: all (`exact`, for up to 16 heads), or those found by the scorers, the
    searches and a beam search with swaps (`beam`). `auto` is `exact` if that is possible."""
    beam_width: Annotated[int, Ge(1)] = 8
    """Number of subsets that the beam search keeps at each step."""
    tolerance_nats: Annotated[float, Ge(0)] = 0.01
    """The largest cost of a prunable head, in nats of mean loss."""
    few_passes: Annotated[float, Ge(0)] = 30
    """A limit on the cost in forward passes over the score split; a backward pass counts two. The report names the best
    choice at any cost and the best within this limit."""

    tables = ("winner", "methods", "heads", "pruning", "oracle", "agreement", "training")
    figures = (report.method_curves, report.regret_map, head_scores, training_curve)
    figures_over_runs = (report.compare_methods, compare_curves)
    stages: ClassVar[Stages] = {"score": 300, "best subset": 80, "prune": 15, "score again": 190, "prove": 1}
    say = staticmethod(report.say)
    say_in_common = staticmethod(report.over_runs)
    headline = staticmethod(report.headline)
    head_map = staticmethod(report.head_map)

    def check(self, setup: Setup) -> None:
        grid, scorers, schedules = setup.grid, setup.scorers, setup.schedules
        if (examples := len(setup.source.splits.score)) < 4:
            raise ValueError(f"{setup.source.key}.score={examples}: halves of the split need 4 or more examples")
        if not using_scores(schedules):
            raise ValueError(
                f"schedule=[{','.join(schedules)}]: must name at least one that uses scores, for example one_shot"
            )
        most = min(len(schedule.smallest(grid).removed) for schedule in schedules.values())
        heads_to_remove(self.budgets, len(grid), most)
        with_a_choice(self.budgets, len(grid))
        if all(scorer.family == UNINFORMED for scorer in scorers.values()):
            raise ValueError(
                f"scorer={list(scorers)}: must name at least one scorer beside a control, for example scorer=[ablation]"
            )
        try:
            most_heads_for(self.oracle, len(grid))
        except ValueError as error:
            raise ValueError(f"experiment.{error}") from None

    def __call__(self, study: Study) -> Findings:
        subject, splits = study.subject, study.splits
        budgets = heads_to_remove(self.budgets, len(subject.grid))
        scoring = Scoring(subject, splits.score, study.seed, study.remember)
        with doing("score", 1):
            compared = contestants(scoring, study.scorers, study.schedules, removing(budgets, subject.grid))
            heads = heads_table(scoring, study.scorers)
        plans = [plan for choice in compared.values() for plan in choice.plans]
        with doing("best subset", 1):
            oracle = find_best(
                subject,
                splits.choose,
                budgets,
                self.oracle,
                self.beam_width,
                also=[plan.mask for plan in plans],
                remember=study.remember,
            )
        kind = "exact" if oracle.exact else "bound"
        best = [Plan(name, 0, kind, oracle.best(k, name), str(k)) for name in OBJECTIVES for k in budgets]
        with doing("prune"):
            pruned = prune(subject, [*plans, *best], splits)
        pruning, bests = pruned.table[: len(plans)], pruned.table[len(plans) :]
        oracles = bests.rename(columns={"scorer": "objective", "schedule": "kind"}).drop(columns="draw")
        oracles.insert(2, "masks_evaluated", len(oracle.outcomes))
        regrets = Regrets(plans, best, pruned.reported)
        each = pd.DataFrame([regrets.columns([plan]) for plan in plans])
        pruning = pd.concat([pruning.reset_index(drop=True), each], axis=1)
        pruning.insert(1, "family", [compared[name].family for name in pruning["scorer"]])
        pruning.insert(2, "settings", [compared[name].settings for name in pruning["scorer"]])
        agreement = rank_agreement(heads)
        with doing("score again", 2) as step:
            leak = self._leak(study, plans, pruning)
            step.advance()
            reliability = split_half(study)
        methods = methods_table(compared, regrets, pruning, agreement, reliability)
        winner = winner_table(methods, regrets, self.few_passes)
        facts = prunable_columns(heads, self.tolerance_nats) | leak | {"oracle": kind}
        with doing("prove"):
            proved = proofs(subject, splits.report)
        return Findings(
            {
                "winner": winner.assign(**facts),
                "methods": methods,
                "heads": heads,
                "pruning": pruning,
                "oracle": oracles.reset_index(drop=True),
                "agreement": agreement,
                **study.training_table,
            },
            {"max_difference_masked_removed": pruned.difference, **proved},
        )

    def _leak(self, study: Study, plans: Sequence[Plan], pruning: pd.DataFrame) -> dict[str, float]:
        """Return how much higher the reported exact match would be if scoring and choosing used the report split too.

        At each budget the best scorer is chosen twice: on the report split, and on the choose split. The leak is the
        difference of the two reported numbers, mean over budgets. Scorers that train or draw and searches are left out.
        """
        scorers = {
            name: scorer
            for name, scorer in study.scorers.items()
            if not isinstance(scorer, TrainedGates) and scorer.family != UNINFORMED
        }
        if not scorers:
            return {"leak": nan, "leak_low": nan, "leak_high": nan}
        subject, reported = study.subject, study.splits.report
        budgets = with_a_choice(self.budgets, len(subject.grid))
        unfair = Scoring(subject, reported, study.seed)
        again = contestants(unfair, scorers, using_scores(study.schedules), removing(budgets, subject.grid))
        mixed = [plan for choice in again.values() for plan in choice.plans]
        candidates = best_first(pruning[pruning["scorer"].isin(again)])
        honest = {k: plans[candidates.index[candidates["heads_removed"] == k][0]].mask for k in budgets}
        masks = list(dict.fromkeys([*(plan.mask for plan in mixed), *honest.values()]))
        exact_ME = measure_removed(subject, reported, masks).quality.double().cpu().numpy()
        exact = dict(zip(masks, exact_ME, strict=True))
        gains = []
        for k in budgets:
            seeming = max((exact[plan.mask] for plan in mixed if len(plan.mask.removed) == k), key=np.mean)
            gains.append(seeming - exact[honest[k]])
        return with_interval("leak", np.mean(gains, axis=0), difference_interval)


def using_scores(schedules: Mapping[str, Schedule]) -> dict[str, Schedule]:
    """Return the schedules that use scores. The others are searches."""
    return {name: schedule for name, schedule in schedules.items() if schedule.scoring != "none"}


def best_first(rows: pd.DataFrame) -> pd.DataFrame:
    """Sort rows by exact match on the choose split. Ties go to the lower loss on that split."""
    return rows.sort_values([CHOOSE_QUALITY, "choose_loss"], ascending=[False, True], kind="stable")


def split_half(study: Study) -> dict[str, float]:
    """Return Spearman's rank correlation between a scorer's scores on two halves of the score split.

    A scorer that draws at random draws again for the second half. Scorers that read no examples have no reliability.
    """
    score = study.splits.score
    first, second = (
        Scoring(study.subject, score[torch.arange(i, len(score), 2)], study.seed + i, study.remember) for i in (0, 1)
    )
    return {
        name: spearman(*(scoring(name, scorer).scores.values[0].cpu().numpy() for scoring in (first, second)))
        for name, scorer in study.scorers.items()
        if scorer.reads_examples
    }


def methods_table(
    compared: Mapping[str, Choice],
    regrets: Regrets,
    pruning: pd.DataFrame,
    agreement: pd.DataFrame,
    reliability: Mapping[str, float],
) -> pd.DataFrame:
    """Return one row per scorer or search: means over draws and over the budgets that remove some heads and keep some.

    Intervals are over examples, not over draws. The *choose* columns are of the first draw. The cost covers the choices
    for all budgets.
    """
    rows = []
    for name, choice in compared.items():
        curve = pruning[(pruning["scorer"] == name) & (pruning["draw"] == 0)]
        inner = curve[curve["heads_removed"].between(1, curve["heads_total"] - 1)]
        rows.append(
            {
                "scorer": name,
                "family": choice.family,
                "settings": choice.settings,
                "schedule": choice.schedule,
                CHOOSE_QUALITY: float(inner[CHOOSE_QUALITY].mean()),
                "choose_loss": float(inner["choose_loss"].mean()),
                **regrets.columns(regrets.of(name)),
                "spearman_with_ablation": with_reference(agreement, name),
                "reliability": reliability.get(name, nan),
                **choice.cost,
            }
        )
    return pd.DataFrame(rows)


def winner_table(methods: pd.DataFrame, regrets: Regrets, few_passes: float) -> pd.DataFrame:
    """Return the best methods: a row at any cost, and a row at a cost of at most `few_passes`, if possible."""
    informed = methods[methods["family"] != UNINFORMED]
    within = {limit: best_first(informed[passes(informed) <= limit]) for limit in (inf, few_passes)}
    return pd.DataFrame(
        [{"most_passes": limit, **winner_columns(order, regrets)} for limit, order in within.items() if len(order)]
    )


def winner_columns(order: pd.DataFrame, regrets: Regrets) -> dict[str, Any]:
    """Compare the `first` method on the choose split with all others on the report split, by sign-flip tests at 95 %
    confidence for all comparisons together (Holm 1979).

    `worse` and `better` are significant differences. The other methods are `tied`. The `choice` is the cheapest of the
    first and the tied methods; its regret and cost are in the same row.
    """
    ours, *others = (regrets.regret(regrets.of(name), QUALITY) for name in order["scorer"])
    sure = holm(np.array([sign_flip_p(theirs - ours) for theirs in others])) < 1 - CONFIDENCE
    sides = np.array([(theirs - ours).mean() > 0 for theirs in others], dtype=bool)
    names = order["scorer"].to_numpy()[1:]
    tied = order[[True, *~sure]]
    choice = tied.loc[passes(tied).idxmin()]
    return {
        "first": order["scorer"].iloc[0],
        **{
            column: ", ".join(names[which])
            for column, which in (("tied", ~sure), ("worse", sure & sides), ("better", sure & ~sides))
        },
        "choice": choice["scorer"],
        **{name: choice[name] for name in order if name.startswith("regret_") or name in COSTS},
    }


def prunable_columns(heads: pd.DataFrame, tolerance: float) -> dict[str, float]:
    """Return the number of prunable heads; an empty dict without a score by ablation."""
    ablation = heads[heads["scorer"] == REFERENCE]
    if not len(ablation):
        return {}
    count = int(prunable(ablation[MOMENTS].to_numpy().T, tolerance).sum())
    return {"prunable_heads": count, "heads_total": len(ablation), "prunable_tolerance": tolerance}
