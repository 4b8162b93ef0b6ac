"""Train a model, or take it from the cache, and look at what it says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mhaprune.evaluation import evaluate, say_accuracy
from mhaprune.experiments.base import Experiment, Findings
from mhaprune.reporting.plots import Figures
from mhaprune.reporting.shared_figures import training_curve
from mhaprune.tables import Tables
from mhaprune.trained import Study


@dataclass(frozen=True)
class Train(Experiment):
    """The training curve, the accuracy on the report split, the first `examples` of it with what the model answers; and
    the model itself, as `model.pt`."""

    examples: int = 20

    figures: ClassVar[Figures] = (training_curve,)

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ValueError(f"examples={self.examples}: must be 1 or more")

    def __call__(self, study: Study) -> Findings:
        tables = evaluate(study.subject, study.task, study.splits.report, self.examples)
        return Findings({"training": study.history, **tables}, files={"model.pt": study.save(study.subject)})

    @classmethod
    def say(cls, tables: Tables) -> Iterator[str]:
        yield say_accuracy(tables["accuracy"])
