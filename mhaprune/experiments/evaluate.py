"""How good a model is, and which answers it returns."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from mhaprune.evaluation import evaluate
from mhaprune.experiments.base import Experiment, Findings
from mhaprune.model.checkpoint import exported
from mhaprune.reporting.headline import Number, share_number
from mhaprune.reporting.plots import Figures
from mhaprune.reporting.sentences import say_accuracy
from mhaprune.reporting.training_figure import training_curve
from mhaprune.settings.ranges import Ge
from mhaprune.studies.study import Study
from mhaprune.tables import QUALITY, Tables, quality_name


@dataclass(frozen=True)
class Evaluate(Experiment):
    """Accuracy on the report split and on every kind of example, and the first examples of the split."""

    examples: Annotated[int, Ge(1)] = 20
    """Number of examples of the report split to show with the model's answers."""
    export: bool = False
    """Whether to write `model.pt2` too, the program of `torch.export` from source and prefix to logits."""

    needs_training: ClassVar[bool] = True
    tables: ClassVar[tuple[str, ...]] = ("accuracy", "groups", "examples", "training")
    figures: ClassVar[Figures] = (training_curve,)

    def __call__(self, study: Study) -> Findings:
        report, files = study.trained.splits.report, {}
        tables = evaluate(study.subject, study.trained.task, report, self.examples)
        if self.export:
            buffer = io.BytesIO()
            torch.export.save(exported(study.trained.network, report[:4]), buffer)
            files["model.pt2"] = buffer.getvalue()
        return Findings({**study.training_table, **tables}, files=files)

    @staticmethod
    def say(tables: Tables) -> Iterator[str]:
        yield say_accuracy(tables["accuracy"])

    @staticmethod
    def headline(tables: Tables) -> list[Number]:
        return [share_number(quality_name(tables), tables["accuracy"][QUALITY].iloc[0])]
