"""Measure how long the training of a model takes to reach a target and to stay there."""

from dataclasses import dataclass
from typing import Annotated, Any

import pandas as pd

from mhaprune.experiments.base import Experiment, Findings, Setup
from mhaprune.experiments.learn import report
from mhaprune.heads import HeadGrid
from mhaprune.measure.columns import accuracy_columns
from mhaprune.measure.outcomes import measure
from mhaprune.reporting.training import training_curve
from mhaprune.settings.ranges import Within
from mhaprune.studies.study import Study
from mhaprune.tables import VALID_QUALITY

ROUNDING = 1e-6
"""A quality may miss the target by this much: 450 of 500 are 0.9, but their mean in float32 is a little less."""


@dataclass(frozen=True)
class Learn(Experiment):
    """The steps and seconds of training until exact match on the valid split reaches a target and stays there: tables
    `reached` and `training`.

    The target is reached at the first evaluation after which no evaluation is below it. The evaluation before training
    does not count. The time is known to within `training.evaluate_every` steps. A run that misses the target is kept
    with the steps and seconds of its whole training, a lower bound of the time that it needs.

    The seconds count only training steps, in the run that trained the model. They are stored with a model in the cache
    or in a file, and are comparable between models that were trained on one machine under the same load.
    """

    target: Annotated[float | None, Within(0, 1)] = None
    """The exact match to reach. None means the value at which the task counts as learnt."""

    needs_training = True
    question = "How long does training take?"
    then = "`-m experiment=learn training=default,adamw seed=0,1,2` compares recipes seed by seed."
    figures = (training_curve,)
    figures_over_runs = (report.time_to_accuracy,)
    say = staticmethod(report.say)
    headline = staticmethod(report.headline)
    say_in_common = staticmethod(report.over_runs)

    def check(self, setup: Setup) -> None:
        if setup.recipe is None or (saved := setup.recipe.saved) is None:
            return
        model = setup.recipe.model
        if saved.steps_since or len(saved.heads) < len(HeadGrid.full(model.blocks, model.num_heads)):
            raise ValueError(
                f"model_file={saved.path}: was pruned or trained again since its training, must be as experiment=train"
                " saves it"
            )
        if not all("seconds" in row for row in saved.history):
            raise ValueError(f"model_file={saved.path}: has no seconds of its training, must be saved by this version")

    def __call__(self, study: Study) -> Findings:
        target = study.trained.task.learnt if self.target is None else self.target
        size = {"parameters": study.subject.count_parameters()}
        accuracy = accuracy_columns(measure(study.subject, study.splits.report))
        reached = pd.DataFrame([time_to(study.history, target) | size | accuracy])
        return Findings({"reached": reached, **study.training_table})


def time_to(history: pd.DataFrame, target: float) -> dict[str, Any]:
    """Return the steps and seconds to the first evaluation from which on no evaluation is below the target. If the
    target is missed, they are the steps and seconds of the whole training."""
    during = history[history["step"] > 0]
    below = during[VALID_QUALITY] < target - ROUNDING
    stays = during[~below[::-1].cummax()[::-1]]  # the evaluations after the last one below the target
    last = during.iloc[-1]
    found = last if stays.empty else stays.iloc[0]
    return {
        "target": target,
        "reached": not stays.empty,
        "steps": int(found["step"]),
        "seconds": float(found["seconds"]),
        f"best_{VALID_QUALITY}": float(during[VALID_QUALITY].max()),
        f"last_{VALID_QUALITY}": float(last[VALID_QUALITY]),
        "ms_per_step": 1000 * float(last["seconds"]) / int(last["step"]),
    }
