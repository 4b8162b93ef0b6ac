"""How good a model is, and what it says."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from mhaprune.evaluation import evaluate, say_accuracy
from mhaprune.experiments.base import Experiment, Findings
from mhaprune.model.checkpoint import exported
from mhaprune.reporting.plots import Figures
from mhaprune.reporting.shared_figures import training_curve
from mhaprune.tables import Tables
from mhaprune.trained import Study


@dataclass(frozen=True)
class Evaluate(Experiment):
    """Accuracy on the report split, on every kind of example, and the first `examples` with what the model answers.

    With `export` the run also writes `model.pt2`, the program of `torch.export` from source and prefix to logits.
    """

    examples: int = 20
    export: bool = False

    figures: ClassVar[Figures] = (training_curve,)

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ValueError(f"examples={self.examples}: must be 1 or more")

    def __call__(self, study: Study) -> Findings:
        report, files = study.splits.report, {}
        tables = evaluate(study.subject, study.task, report, self.examples)
        if self.export:
            buffer = io.BytesIO()
            torch.export.save(exported(study.subject, report[:4]), buffer)
            files["model.pt2"] = buffer.getvalue()
        return Findings({"training": study.history, **tables}, files=files)

    @classmethod
    def say(cls, tables: Tables) -> Iterator[str]:
        yield say_accuracy(tables["accuracy"])
