"""Train a model, or take it from the cache, and look at what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mhaprune.evaluation import evaluate
from mhaprune.experiments.base import Experiment, Findings, Study
from mhaprune.ranges import Ge


@dataclass(frozen=True)
class Train(Experiment):
    """The training curve, the accuracy on the report split, its first examples, and the model itself, as `model.pt`."""

    examples: Annotated[int, Ge(1)] = 20
    """Number of examples of the report split to show with the model's answers."""

    def __call__(self, study: Study) -> Findings:
        tables = evaluate(study.subject, study.task, study.splits.report, self.examples)
        return Findings({"training": study.history, **tables}, files={"model.pt": study.save(study.subject)})
