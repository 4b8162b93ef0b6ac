"""Train a model, or load a saved model, and look at its answers: the experiments `train` and `evaluate`."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from typing import Annotated, ClassVar

from mhaprune.inputs import Study
from mhaprune.lab.experiments.answers import answer_tables
from mhaprune.lab.experiments.base import Experiment, Findings
from mhaprune.lab.reporting.headline import Number, quality_number
from mhaprune.lab.reporting.names import quality_name
from mhaprune.lab.reporting.plots import amount
from mhaprune.lab.reporting.sentences import say_accuracy, share
from mhaprune.lab.reporting.training_curves import training_curve
from mhaprune.settings.ranges import Ge
from mhaprune.tables import ERROR_RATE, QUALITY, Tables


@dataclass(frozen=True)
class Train(Experiment):
    """The training curve, the accuracy on the report split and on each kind of example, the first examples with their
    answers, and the model itself, as `model.pt`."""

    examples: Annotated[int, Ge(1)] = 20
    """Number of examples of the report split to show with the model's answers."""

    saves: ClassVar[bool] = True
    """Whether the model is saved."""
    needs_training = True
    question = "How good is the model?"
    then = "`experiment=ablate` shows which of its heads can be removed; the model is in the cache already."
    steps = ("model", "figures and page")
    seconds = (17, 1)
    figures = (training_curve,)

    def __call__(self, study: Study) -> Findings:
        tables = answer_tables(study.subject, study.task, study.splits.report, self.examples)
        files = study.saved("model", study.subject) if self.saves else {}
        return Findings({**study.training_table, **tables}, files=files)

    @staticmethod
    def say(tables: Tables) -> Iterator[str]:
        yield say_accuracy(tables["accuracy"])
        row = tables["accuracy"].iloc[0]
        low, high = row[f"{ERROR_RATE}_low"], row[f"{ERROR_RATE}_high"]
        ends = "too few errors for an interval" if isnan(low) else f"95 % interval {share(low)} to {share(high)}"
        rate = f"{amount(100 * row[ERROR_RATE], 1)} %"
        yield f"The symbol error rate is {rate} ({ends}): edits per symbol of the right answers."

    @staticmethod
    def headline(tables: Tables) -> list[Number]:
        return [quality_number(quality_name(tables), tables["accuracy"][QUALITY].iloc[0])]


@dataclass(frozen=True)
class Evaluate(Train):
    """The findings of `train`, without a `model.pt`.

    With `model_file`, the model is a saved one, from `train` or `prune`. Without it, the model comes from the cache or
    is trained.
    """

    saves = False
