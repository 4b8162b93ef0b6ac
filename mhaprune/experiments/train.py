"""Train a model, or take it from the cache, and look at what it says."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from mhaprune.experiments.base import Experiment, Findings, Study
from mhaprune.measure import accuracy_columns, measure


@dataclass(frozen=True)
class Train(Experiment):
    """The training curve, the accuracy on the report split, and the first `examples` of it with what the model
    answers."""

    examples: int = 20

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ValueError(f"examples={self.examples}: must be 1 or more")

    def __call__(self, study: Study) -> Findings:
        report = study.splits.report
        shown = report[: self.examples]
        predicted = study.subject.predict(shown)
        rows = []
        for source, target, answer in zip(
            shown.source.tolist(), shown.target.tolist(), predicted.tolist(), strict=True
        ):
            said = " ".join(study.task.vocabulary.decode(answer))
            right = study.task.vocabulary.decode(answer) == study.task.vocabulary.decode(target)
            rows.append({"example": study.task.show(source, target), "prediction": said, "correct": right})
        accuracy = {"heads_total": len(study.subject.grid), **accuracy_columns(measure(study.subject, report))}
        tables = {"training": study.history, "accuracy": pd.DataFrame([accuracy]), "examples": pd.DataFrame(rows)}
        return Findings(tables)
