"""Every score on one model, against the best subset of heads there is.

Dimensions: E = examples of the report split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import nan
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from mhaprune.data import Examples
from mhaprune.experiments.base import Experiment, Findings, Study
from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.measure import greedy_disagreements, measure_masks
from mhaprune.oracle import OBJECTIVES, find_best, most_heads_for
from mhaprune.pruning import PROOF_BATCH, Plan, asked_for, make_plans, prune, smallest_bite
from mhaprune.schedules.base import check_budgets, heads_to_remove
from mhaprune.scorers.base import Scorer
from mhaprune.scoring import Scoring, heads_table, settings_text
from mhaprune.statistics import (
    area_weights,
    bootstrap_interval,
    kendall,
    kendall_interval,
    overlap,
    overlap_interval,
    prunable,
    spearman,
    spearman_interval,
)
from mhaprune.subject import Outcome

REFERENCE = "ablation"
"""The score that the others are compared with."""


@dataclass(frozen=True)
class Compare(Experiment):
    """Scorers × budgets × oracle: tables `winner`, `methods`, `heads`, `pruning`, `oracle`, `agreement` and `training`.

    `budgets` are fractions of all heads (0.25) or numbers of heads (6). The oracle is the best subset on the *choose*
    split, of all up to 16 heads (`exact`), else of those that a beam search of `beam_width` with swaps and the scorers
    come upon (`beam`); `auto` takes the first that it can. Regret is what a scorer's subset loses against it on the
    *report* split. A head is prunable if at 95 % confidence its ablation costs less than `tolerance` nats.
    """

    budgets: tuple[int | float, ...] = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
    oracle: Literal["auto", "exact", "beam"] = "auto"
    beam_width: int = 8
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        check_budgets(self.budgets)
        if self.beam_width < 1:
            raise ValueError(f"beam_width={self.beam_width}: must be 1 or more")
        if self.tolerance < 0:
            raise ValueError(f"tolerance={self.tolerance}: must be 0 or more nats")

    def check(self, grid: HeadGrid, scorers: Mapping[str, Scorer]) -> None:
        inner = [budget for budget in heads_to_remove(self.budgets, len(grid)) if 0 < budget < len(grid)]
        if not inner:
            raise ValueError(f"experiment.budgets={list(self.budgets)}: none of them leaves a choice between heads")
        if not scorers:
            raise ValueError("scorer=[]: must name at least one scorer, for example scorer=[ablation]")
        most_heads_for(self.oracle, len(grid))

    def __call__(self, study: Study) -> Findings:
        subject, splits = study.subject, study.splits
        if len(splits.score) < 4:
            raise ValueError(f"task.score={len(splits.score)}: halves of the split need 4 or more examples")
        budgets = heads_to_remove(self.budgets, len(subject.grid))
        scoring = Scoring(subject, splits.score, study.seed, study.remember)
        plans = list(make_plans(scoring, study.scorers, study.schedule, budgets))
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
        best = [Plan(name, 0, kind, oracle.best(k, name)) for name in OBJECTIVES for k in budgets]
        pruned = prune(subject, [*plans, *best], splits)
        pruning, bests = pruned.table[: len(plans)], pruned.table[len(plans) :]
        oracles = bests.rename(columns={"scorer": "objective", "schedule": "kind"}).drop(columns="draw")
        oracles.insert(2, "masks_evaluated", len(oracle.outcomes))
        curves = _Curves(plans, best, pruned.reported)
        regrets = pd.DataFrame([curves.regret_columns([plan]) for plan in plans])
        pruning = pd.concat([pruning.reset_index(drop=True), regrets], axis=1)
        pruning.insert(1, "family", [study.scorers[name].family for name in pruning["scorer"]])
        pruning.insert(2, "settings", [settings_text(study.scorers[name]) for name in pruning["scorer"]])
        heads = heads_table(scoring, study.scorers)
        agreement = rank_agreement(heads)
        reliability = split_half(study)
        methods = methods_table(study.scorers, scoring, curves, pruning, agreement, reliability)
        winner = winner_table(methods, curves, heads, self.tolerance)
        winner["leak"] = self._leak(study, budgets, pruning)
        winner["oracle"] = kind
        return Findings(
            {
                "winner": winner,
                "methods": methods,
                "heads": heads,
                "pruning": pruning,
                "oracle": oracles.reset_index(drop=True),
                "agreement": agreement,
                "training": study.history,
            },
            {
                "max_difference_masked_removed": pruned.difference,
                "min_difference_open_closed": smallest_bite(subject, splits.report[:PROOF_BATCH]),
                "greedy_decoding_disagreements": greedy_disagreements(subject, splits.report),
            },
        )

    def _leak(self, study: Study, budgets: Sequence[int], pruning: pd.DataFrame) -> float:
        """What exact match would seem to be gained by scoring, choosing and reporting on the report split alone.

        It is the gain of the best scorer at each budget, mean over budgets, without the scorers that draw or train.
        """
        scorers = {name: one for name, one in study.scorers.items() if not one.trains and one.family != "control"}
        inner = [budget for budget in budgets if 0 < budget < len(study.subject.grid)]
        if not scorers:
            return nan
        scoring = Scoring(study.subject, study.splits.report, study.seed)
        plans = list(make_plans(scoring, scorers, study.schedule, inner))
        masks = list(dict.fromkeys(plan.mask for plan in plans))
        device = study.splits.report.source.device
        gates_MN = torch.stack([mask.gates(device) for mask in masks])
        exact_M = measure_masks(study.subject, study.splits.report, gates_MN).sequence_accuracy.double().mean(dim=1)
        exact = dict(zip(masks, exact_M.tolist(), strict=True))
        honest = pruning[pruning["scorer"].isin(list(scorers))].sort_values(
            ["choose_sequence_accuracy", "choose_loss"], ascending=[False, True], kind="stable"
        )
        gains = []
        for budget in inner:
            mixed = max(exact[plan.mask] for plan in plans if len(plan.mask.removed) == budget)
            gains.append(mixed - honest[honest["heads_removed"] == budget]["sequence_accuracy"].iloc[0])
        return float(np.mean(gains))


class _Curves:
    """Example by example, what the subsets of a scorer do on the report split beside those of the oracle."""

    def __init__(self, plans: Iterable[Plan], best: Iterable[Plan], reported: Mapping[HeadMask, Outcome]) -> None:
        self.plans, self.reported = list(plans), reported
        self.best = {(plan.scorer, len(plan.mask.removed)): plan.mask for plan in best}

    def outcome(self, mask: HeadMask, name: str) -> np.ndarray:
        values: np.ndarray = getattr(self.reported[mask], name).double().cpu().numpy()
        return values

    def of(self, scorer: str) -> list[Plan]:
        """The plans in which there was something to choose."""
        mine = [plan for plan in self.plans if plan.scorer == scorer]
        return [plan for plan in mine if 0 < len(plan.mask.removed) < len(plan.mask.grid)]

    def regret(self, plans: Sequence[Plan], name: str) -> np.ndarray:
        """(E,): by how much worse than the oracle, mean over the plans; in nats or in share of exact matches."""
        sign = 1 if name == "loss" else -1
        return sign * np.mean(
            [
                self.outcome(plan.mask, name) - self.outcome(self.best[name, len(plan.mask.removed)], name)
                for plan in plans
            ],
            axis=0,
        )

    def regret_columns(self, plans: Sequence[Plan]) -> dict[str, float]:
        columns: dict[str, float] = {}
        for name in reversed(OBJECTIVES):
            columns |= with_interval(f"regret_{name}", self.regret(plans, name))
        return columns

    def area_columns(self, scorer: str) -> dict[str, float]:
        mine = [plan for plan in self.plans if plan.scorer == scorer]
        curve = {
            removed: np.mean(
                [self.outcome(p.mask, "sequence_accuracy") for p in mine if len(p.mask.removed) == removed], 0
            )
            for removed in sorted({len(plan.mask.removed) for plan in mine})
        }
        return with_interval("area", np.einsum("b,be->e", area_weights(list(curve)), np.stack(list(curve.values()))))


def with_interval(name: str, values_E: np.ndarray) -> dict[str, float]:
    """The mean and its 95 % interval over examples, in three columns."""
    low, high = bootstrap_interval(values_E)
    return {name: float(values_E.mean()), f"{name}_low": low, f"{name}_high": high}


def rank_agreement(heads: pd.DataFrame) -> pd.DataFrame:
    """One row per pair of scorers that rank once: how alike they order the heads, with 95 % intervals over heads.

    `overlap` is the share of the `overlap_heads` lowest heads, half of all, that two scorers have in common.
    """
    draws = heads.groupby("scorer", sort=False)["draw"].nunique()
    columns = {name: heads.loc[heads["scorer"] == name, "score"].to_numpy() for name in draws.index[draws == 1]}
    rows: list[dict[str, Any]] = []
    for first, second in combinations(columns, 2):
        a, b = columns[first], columns[second]
        k = len(a) // 2
        row: dict[str, Any] = {"scorer": first, "other": second}
        for name, value, (low, high) in (
            ("spearman", spearman(a, b), spearman_interval(a, b)),
            ("kendall", kendall(a, b), kendall_interval(a, b)),
            ("overlap", overlap(a, b, k), overlap_interval(a, b, k)),
        ):
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
        rows.append(row | {"overlap_heads": k})
    return pd.DataFrame(rows, columns=None if rows else ["scorer", "other", "spearman"])


def split_half(study: Study) -> dict[str, float]:
    """Spearman's rank correlation of a scorer's scores on one half of the score split with those on the other."""
    halves: list[Examples] = [study.splits.score[torch.arange(i, len(study.splits.score), 2)] for i in (0, 1)]
    first, second = (Scoring(study.subject, half, study.seed, study.remember) for half in halves)
    result = {}
    for name, scorer in study.scorers.items():
        if scorer.family != "control":
            values = [scoring(name, scorer).scores.values[0].cpu().numpy() for scoring in (first, second)]
            result[name] = spearman(*values)
    return result


def methods_table(
    scorers: Mapping[str, Scorer],
    scoring: Scoring,
    curves: _Curves,
    pruning: pd.DataFrame,
    agreement: pd.DataFrame,
    reliability: Mapping[str, float],
) -> pd.DataFrame:
    """One row per scorer; of one that draws several times the mean over its draws."""
    rows = []
    num_heads = len(scoring.subject.grid)
    for name, scorer in scorers.items():
        curve = pruning[(pruning["scorer"] == name) & (pruning["draw"] == 0)].sort_values("heads_removed")
        chosen = curve["choose_sequence_accuracy"].to_numpy()
        pair = agreement[(agreement[["scorer", "other"]] == name).any(axis=1)]
        pair = pair[(pair[["scorer", "other"]] == REFERENCE).any(axis=1)] if name != REFERENCE else pair[:0]
        rho = pair.iloc[0] if len(pair) else {}
        rows.append(
            {
                "scorer": name,
                "family": scorer.family,
                "settings": settings_text(scorer),
                **curves.area_columns(name),
                "choose_area": float(np.sum(area_weights(curve["heads_removed"]) * chosen)),
                "choose_loss": float(curve["choose_loss"].mean()),
                **curves.regret_columns(curves.of(name)),
                **{f"spearman_with_ablation{end}": rho.get(f"spearman{end}", nan) for end in ("", "_low", "_high")},
                "reliability": reliability.get(name, nan),
                **scoring.cost(asked_for(scorer, int(k), num_heads) for k in curve["heads_removed"]),
            }
        )
    return pd.DataFrame(rows)


def winner_table(methods: pd.DataFrame, curves: _Curves, heads: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """One row: the scorer of the largest area on the choose split, and on the report split by how much it beats the
    next."""
    candidates = methods[methods["family"] != "control"] if (methods["family"] != "control").any() else methods
    order = candidates.sort_values(["choose_area", "choose_loss"], ascending=[False, True], kind="stable")
    best = order.iloc[0]
    row: dict[str, Any] = {"winner": best["scorer"]}
    row |= {name: best[name] for name in order if name.startswith("regret_")}
    row["runner_up"] = order.iloc[1]["scorer"] if len(order) > 1 else None
    margin = {"margin": nan, "margin_low": nan, "margin_high": nan}
    if len(order) > 1:
        ours, theirs = (curves.regret(curves.of(name), "sequence_accuracy") for name in order["scorer"][:2])
        margin = with_interval("margin", theirs - ours)
    row |= margin | {"beyond_noise": margin["margin_low"] > 0}
    ablation = heads[heads["scorer"] == REFERENCE]
    if len(ablation):
        row["prunable_heads"] = int(prunable(ablation["score"], ablation["stderr"], tolerance).sum())
        row |= {"heads_total": len(ablation), "prunable_tolerance": tolerance}
    return pd.DataFrame([row])
