"""Compare all scores and searches on one model with the best subset of heads.

Dimensions: E = examples of the report split.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd

from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.experiments.base import Findings, HeadBudgets, Setup, with_proofs
from mhaprune.lab.experiments.budgets import with_a_choice
from mhaprune.lab.experiments.compare import compare_report as report
from mhaprune.lab.experiments.compare.compare_report import passes
from mhaprune.lab.reporting.plots import appendix
from mhaprune.lab.reporting.training_curves import training_curve
from mhaprune.progress import doing, track
from mhaprune.pruning.oracle import OBJECTIVES, find_best, most_heads_for
from mhaprune.pruning.plans import COSTS, Choice, Plan, choices
from mhaprune.pruning.pruned import prune
from mhaprune.scorers.scoring import Scoring, heads_table
from mhaprune.settings.ranges import Ge
from mhaprune.statistics import intervals
from mhaprune.subject import Outcome
from mhaprune.tables import CHOOSE_QUALITY, QUALITY, UNINFORMED


class Regrets:
    """Regret: how much worse plans are than the oracle, on each example. `plans` are from scorers and searches, `best`
    from the oracle; `reported` has the outcome of each mask on the report split. A plan in `best` has its objective,
    "loss" or "quality", in the field `scorer`."""

    def __init__(self, plans: Iterable[Plan], best: Iterable[Plan], reported: Mapping[HeadMask, Outcome]) -> None:
        self.plans, self.reported = list(plans), reported
        self.best = {(plan.scorer, len(plan.mask.removed)): plan.mask for plan in best}

    def of(self, scorer: str) -> list[Plan]:
        """Return the plans of a scorer that remove some heads and keep some. Only such plans choose heads."""
        plans = [plan for plan in self.plans if plan.scorer == scorer]
        return [plan for plan in plans if 0 < len(plan.mask.removed) < len(plan.mask.grid)]

    def regret(self, plans: Sequence[Plan], name: str) -> np.ndarray:
        """Return how much worse the plans are than the oracle on each example, (E,), as a mean over the plans. The unit
        is nats for the name "loss", the share of exact matches for "quality"."""
        sign = 1 if name == "loss" else -1
        pairs = [(plan.mask, self.best[name, len(plan.mask.removed)]) for plan in plans]
        differences = [self._outcome(mask, name) - self._outcome(best, name) for mask, best in pairs]
        return sign * np.mean(differences, axis=0)

    def _outcome(self, mask: HeadMask, name: str) -> np.ndarray:
        values: np.ndarray = getattr(self.reported[mask], name).double().cpu().numpy()
        return values

    def columns(self, plans: Sequence[Plan]) -> dict[str, float]:
        """Return `regret_quality` and `regret_loss` with intervals. If no loss differs, the interval of `regret_loss`
        is 0 to 0."""
        quality_E, loss_E = self.regret(plans, QUALITY), self.regret(plans, "loss")
        of_loss = intervals.mean_interval if loss_E.any() else lambda values_E: (0.0, 0.0)
        columns = intervals.with_interval("regret_quality", quality_E, intervals.difference_interval)
        return columns | intervals.with_interval("regret_loss", loss_E, of_loss)


@dataclass(frozen=True)
class Compare(HeadBudgets):
    """Scorers and searches × budgets, against an oracle: tables `winner`, `methods`, `heads`, `pruning`, `oracle`,
    `training`.

    A schedule that uses no scores is a search, and competes with the scorers under its own name. The oracle is the best
    subset of heads on the *choose* split. Regret is how much worse a chosen subset is than the oracle on the *report*
    split.
    """

    oracle: Literal["auto", "exact", "beam"] = "auto"
    """The subsets that compete to be the best: all (`exact`, for up to 16 heads), or those found by the scorers, the
    searches and a beam search with swaps (`beam`). `auto` is `exact` if that is possible."""
    beam_width: Annotated[int, Ge(1)] = 8
    """Number of subsets that the beam search keeps at each step."""
    few_passes: Annotated[float, Ge(0)] = 30
    """A limit on the cost in forward passes over the score split; a backward pass counts two. The report names the best
    choice at any cost and the best within this limit."""

    question = "Which score chooses heads best, and is a search worth its cost?"
    then = "`experiment=ablate scorer=[NAME]` removes heads by the score that you choose."
    steps = ("model", "score", "best subset", "prune", "prove", "figures and page")
    seconds = (17, 19, 125, 15, 0.1, 1)
    figures = (report.regret_map, appendix(training_curve))
    figures_over_runs = (report.compare_methods,)
    say = staticmethod(report.say)
    say_in_common = staticmethod(report.say_over_runs)
    headline = staticmethod(report.headline)

    def check(self, setup: Setup) -> None:
        if all(schedule.scoring == "none" for schedule in setup.schedules.values()):
            raise ValueError(
                f"schedule=[{','.join(setup.schedules)}]: must name at least one that uses scores, for example one_shot"
            )
        super().check(setup)
        with_a_choice(self.budgets, len(setup.grid))
        if all(scorer.family == UNINFORMED for scorer in setup.scorers.values()):
            raise ValueError(
                f"scorer={list(setup.scorers)}: must name at least one scorer beside a control, for example"
                " scorer=[ablation]"
            )
        try:
            most_heads_for(self.oracle, len(setup.grid))
        except ValueError as error:
            raise ValueError(f"experiment.{error}") from None

    def __call__(self, study: Study) -> Findings:
        subject, splits = study.subject, study.splits
        budgets = self.removals(subject.grid)
        scoring = Scoring(subject, splits.score, study.seed, study.remember)
        with doing("score"):
            compared = self._contestants(study, scoring)
            heads = heads_table(scoring, study.scorers)
        plans = [plan for choice in compared.values() for plan in choice.plans]
        masks = [plan.mask for plan in plans]
        with doing("best subset"):
            oracle = find_best(
                subject, splits.choose, budgets, self.oracle, self.beam_width, masks, remember=study.remember
            )
        kind = "exact" if oracle.exact else "bound"
        best = [Plan(name, 0, kind, oracle.best(k, name)) for name in OBJECTIVES for k in budgets]
        with doing("prune"):
            pruned = prune(subject, [*plans, *best], splits)
        pruning, oracles = pruned.table[: len(plans)], pruned.table[len(plans) :].reset_index(drop=True)
        oracles = oracles.rename(columns={"scorer": "objective", "schedule": "kind"}).drop(columns="draw")
        oracles.insert(2, "masks_evaluated", len(oracle.outcomes))
        regrets = Regrets(plans, best, pruned.reported)
        pruning = pruning.join(pd.DataFrame([regrets.columns([plan]) for plan in plans]))
        pruning.insert(1, "family", [compared[name].family for name in pruning["scorer"]])
        pruning.insert(2, "settings", [compared[name].settings for name in pruning["scorer"]])
        methods = methods_table(compared, regrets, pruning)
        tables = {
            "winner": winner_table(methods, regrets, self.few_passes).assign(oracle=kind),
            "methods": methods,
            "heads": heads,
            "pruning": pruning,
            "oracle": oracles,
            **study.training_table,
        }
        return with_proofs(study, tables, pruned.difference)

    def _contestants(self, study: Study, scoring: Scoring) -> dict[str, Choice]:
        """Return the choices of heads by name. A choice is named after its scorer or search, or `scorer + schedule` if
        an earlier schedule used the scorer too. The plans of a choice get its name as their `scorer`."""
        budgets, contestants = self.removals(scoring.subject.grid), dict[str, Choice]()
        for how, schedule in track(study.schedules.items(), "schedule"):
            for choice in choices(scoring, study.scorers, schedule, budgets, how):
                name = f"{choice.scorer} + {how}" if choice.scorer in contestants else choice.scorer
                contestants[name] = choice._replace(plans=[plan._replace(scorer=name) for plan in choice.plans])
        return contestants


def methods_table(compared: Mapping[str, Choice], regrets: Regrets, pruning: pd.DataFrame) -> pd.DataFrame:
    """Return one row per scorer or search: means over draws and over the budgets that remove some heads and keep some.

    Intervals are over examples, not over draws. The *choose* columns are of the first draw. The cost covers the choices
    for all budgets.
    """
    rows = []
    for name, choice in compared.items():
        curve = pruning[(pruning["scorer"] == name) & (pruning["draw"] == 0)]
        inner = curve[curve["heads_removed"].between(1, curve["heads_total"] - 1)]
        rows.append(
            {"scorer": name, "family": choice.family, "settings": choice.settings, "schedule": choice.schedule}
            | inner[[CHOOSE_QUALITY, "choose_loss"]].mean().to_dict()
            | regrets.columns(regrets.of(name))
            | choice.cost
        )
    return pd.DataFrame(rows)


def winner_table(methods: pd.DataFrame, regrets: Regrets, few_passes: float) -> pd.DataFrame:
    """Return the best method at any cost and, if one exists, the best at a cost of at most `few_passes`, a row each."""
    informed = methods[methods["family"] != UNINFORMED]
    order = informed.sort_values([CHOOSE_QUALITY, "choose_loss"], ascending=[False, True], kind="stable")
    within = {limit: order[passes(order) <= limit] for limit in (inf, few_passes)}
    return pd.DataFrame(
        [{"most_passes": limit, **winner_columns(order, regrets)} for limit, order in within.items() if len(order)]
    )


def winner_columns(order: pd.DataFrame, regrets: Regrets) -> dict[str, Any]:
    """Take the best method on the choose split, `first`, and compare it with each other method on the report split, by
    sign-flip tests at 95 % confidence for all comparisons together (Holm 1979).

    Significantly different methods are listed as `worse` or `better`, all others as `tied`. The `choice` is the
    cheapest method among `first` and `tied`; its regret and cost are in the same row.
    """
    ours, *others = (regrets.regret(regrets.of(name), QUALITY) for name in order["scorer"])
    p_values = np.array([intervals.sign_flip_p(theirs - ours) for theirs in others])
    sure = intervals.holm(p_values) < 1 - intervals.CONFIDENCE
    worse = np.array([(theirs - ours).mean() > 0 for theirs in others], dtype=bool)
    first, *names = order["scorer"]
    sides = {"tied": ~sure, "worse": sure & worse, "better": sure & ~worse}
    tied = order[[True, *~sure]]
    choice = tied.loc[passes(tied).idxmin()]
    return {
        "first": first,
        **{side: ", ".join(np.array(names, dtype=object)[which]) for side, which in sides.items()},
        "choice": choice["scorer"],
        **{name: choice[name] for name in order if name.startswith("regret_") or name in COSTS},
    }
