"""Train a model, or take it from the cache, and look at its answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from mhaprune.evaluation import evaluate
from mhaprune.experiments.base import Experiment, Findings
from mhaprune.reporting.headline import Number, share_number
from mhaprune.reporting.plots import Figures
from mhaprune.reporting.sentences import say_accuracy
from mhaprune.reporting.training_figure import training_curve
from mhaprune.settings.ranges import Ge
from mhaprune.studies.study import Study
from mhaprune.tables import QUALITY, Tables, quality_name


@dataclass(frozen=True)
class Train(Experiment):
    """The training curve, the accuracy on the report split, its first examples, and the model itself, as `model.pt`."""

    examples: Annotated[int, Ge(1)] = 20
    """Number of examples of the report split to show with the model's answers."""

    needs_training: ClassVar[bool] = True
    tables: ClassVar[tuple[str, ...]] = ("accuracy", "groups", "examples", "training")
    figures: ClassVar[Figures] = (training_curve,)

    def __call__(self, study: Study) -> Findings:
        trained = study.trained
        tables = evaluate(trained.network, trained.task, trained.splits.report, self.examples)
        return Findings({**study.training_table, **tables}, files=study.saved("model", trained.network))

    @staticmethod
    def say(tables: Tables) -> Iterator[str]:
        yield say_accuracy(tables["accuracy"])

    @staticmethod
    def headline(tables: Tables) -> list[Number]:
        return [share_number(quality_name(tables), tables["accuracy"][QUALITY].iloc[0])]
