"""Regret: the loss of a choice of heads against the best choice, example by example.

Dimensions: E = examples of the report split.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mhaprune.heads import HeadMask
from mhaprune.pruning.oracle import OBJECTIVES
from mhaprune.pruning.plans import Plan
from mhaprune.statistics.intervals import difference_interval, mean_interval, with_interval
from mhaprune.subject import Outcome


class Regrets:
    """The plans of scorers and of the oracle, and the outcomes of both on the report split. The `scorer` of an oracle's
    plan is its objective: "loss" or "quality"."""

    def __init__(self, plans: Iterable[Plan], best: Iterable[Plan], reported: Mapping[HeadMask, Outcome]) -> None:
        self.plans, self.reported = list(plans), reported
        self.best = {(plan.scorer, len(plan.mask.removed)): plan.mask for plan in best}

    def of(self, scorer: str) -> list[Plan]:
        """Return the plans of a scorer that remove some heads and keep some; otherwise there is no choice."""
        plans = [plan for plan in self.plans if plan.scorer == scorer]
        return [plan for plan in plans if 0 < len(plan.mask.removed) < len(plan.mask.grid)]

    def outcome(self, mask: HeadMask, name: str) -> np.ndarray:
        """Return the loss ("loss") or quality ("quality") of each example of the report split under a mask, (E,)."""
        outcome = self.reported[mask]
        values: np.ndarray = (outcome.loss if name == "loss" else outcome.quality).double().cpu().numpy()
        return values

    def regret(self, plans: Sequence[Plan], name: str) -> np.ndarray:
        """Return how much worse the plans are than the oracle, (E,), as a mean over the plans; in nats or in share of
        exact matches."""
        sign = 1 if name == "loss" else -1
        differences = [
            self.outcome(plan.mask, name) - self.outcome(self.best[name, len(plan.mask.removed)], name)
            for plan in plans
        ]
        return sign * np.mean(differences, axis=0)

    def columns(self, plans: Sequence[Plan]) -> dict[str, float]:
        """Return `regret_quality` and `regret_loss` with intervals. The best subset has regret 0 for certain."""
        columns: dict[str, float] = {}
        for name in reversed(OBJECTIVES):
            regret_E = self.regret(plans, name)
            loss = mean_interval if regret_E.any() else lambda values_E: (0.0, 0.0)
            columns |= with_interval(f"regret_{name}", regret_E, loss if name == "loss" else difference_interval)
        return columns
