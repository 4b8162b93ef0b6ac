"""What a schedule is shown of a subject, with a count of what that takes.

Dimensions: E = examples of the score split, N = all heads, M = masks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.measure import gate_gradients, measure_removed
from mhaprune.pruning.refits import Refits
from mhaprune.schedules.base import Evidence, Schedule
from mhaprune.schedules.budgets import Budget
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.scoring import Scoring, naming
from mhaprune.subject import Refittable, Subject

COSTS = ("forward_passes", "backward_passes", "seconds")
"""What a choice of heads takes: passes over the score split, and time."""


class Search:
    """One call of a schedule, and what it takes beyond the score of the whole model.

    It exists so that a score and a search can be compared at equal cost: every mask that a schedule measures counts as
    one forward pass over the score split, although shared prefixes make it faster than that.
    """

    def __init__(
        self,
        scoring: Scoring,
        name: str = "",
        scorer: Scorer | None = None,
        draw: int = 0,
        whole: HeadGrid | None = None,
    ) -> None:
        """Without a `scorer` the schedule may read no score."""
        self.scoring, self.name, self.scorer, self.draw, self.whole = scoring, name, scorer, draw, whole
        self.forward_passes = self.backward_passes = self.seconds = 0.0
        self.refitting: list[Refits] = []

    def __call__(self, schedule: Schedule, budgets: Sequence[Budget]) -> list[HeadMask]:
        if self.scorer is not None:
            self.scoring(self.name, self.scorer)  # now, so that its seconds are not those of the search
        start = time.perf_counter()
        shown = Evidence(self.scoring.subject, self._score, self._loss, self.whole, self._gradients, self._refits)
        masks = schedule(shown, budgets)
        self.seconds += time.perf_counter() - start
        for refits in self.refitting:
            self.forward_passes += refits.passes * len(refits.fitted) / len(self.scoring.examples)
        self.refitting.clear()
        return masks

    @property
    def cost(self) -> dict[str, float]:
        """Passes and seconds."""
        return {name: getattr(self, name) for name in COSTS}

    def _score(self, left: Subject) -> Tensor:
        assert self.scorer is not None, "the schedule reads a score, its `scoring` says none"
        if left is self.scoring.subject:
            return self.scoring(self.name, self.scorer).scores.values[self.draw]
        with naming(self.name):
            scores = self.scorer(left, self.scoring.examples, self.scoring.seed)
        self.forward_passes += scores.forward_passes
        self.backward_passes += scores.backward_passes
        return scores.values[self.draw]

    def _loss(self, masks: Sequence[HeadMask]) -> Tensor:
        self.forward_passes += len(masks)
        return measure_removed(self.scoring.subject, self.scoring.examples, masks).loss.double().mean(dim=1)

    def _gradients(self) -> Tensor:
        self.forward_passes += 1
        self.backward_passes += 1
        return gate_gradients(self.scoring.subject, self.scoring.examples)

    def _refits(self, examples: int) -> Refits:
        subject = self.scoring.subject
        if not isinstance(subject, Refittable):
            raise ValueError("schedule: this model cannot be refitted; choose a schedule without a refit, as greedy")
        if len(self.scoring.examples) < 2:
            raise ValueError("score: one example; a schedule that refits needs 2 or more, half of them for the losses")
        self.refitting.append(Refits(subject, self.scoring.examples[:examples]))
        return self.refitting[-1]
