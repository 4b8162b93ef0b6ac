"""Train a pruned model a little longer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

import pandas as pd
import torch

from mhaprune.data import Splits
from mhaprune.inputs import Study
from mhaprune.measure.accuracy import largest_drop
from mhaprune.measure.outcomes import measure
from mhaprune.recoveries.base import Pruned, Recovery, State, pruned_digest
from mhaprune.settings.ranges import Ge, Gt, Within
from mhaprune.training.loop import Descent, Objective

EVALUATIONS = 10
"""The number of measurements from which the best weights are kept."""
TIMED = 6
"""The number of steps that are timed, after two, to know how many fit into some minutes."""


@dataclass(frozen=True)
class FineTune(Recovery):
    """A recovery that trains the pruned model further.

    Warm-up takes at most a tenth of the steps. All other settings that are not listed here stay as they were in the
    training of the dense model. A pretrained model is trained by AdamW on its own loss, on the texts of `model.train`;
    if `model.train` is 0, on the *score* split. The learning rate warms up and decays to zero again. A distillation
    alone needs no labels.
    """

    steps: Annotated[int, Ge(1)] = 300
    """Number of optimiser steps."""
    minutes: Annotated[float | None, Gt(0)] = None
    """In place of `steps`: the time that the training takes on this machine, measurements included. The number of steps
    is told from the time of a few, and no control trains as long."""
    learning_rate: Annotated[float | None, Gt(0)] = None
    """The highest learning rate, reached after warm-up. None means 1e-3, or 5e-5 for a pretrained model."""
    batch_size: Annotated[int | None, Ge(1)] = None
    """Number of examples per step. None means the number in the training of the dense model, or 16 for a pretrained
    model."""
    distillation: Annotated[float, Within(0, 1)] = 0.0
    """The weight, 0 to 1, of the distillation loss in the objective (Hinton et al. 2015, at temperature 1). With 0 only
    the targets are trained on; see `Descent.distil`."""
    dropout: bool = True
    """True to train with the dropout of the model; False to train without it, as a distillation alone needs none."""
    keep: Literal["last", "best"] = "last"
    """The weights that are kept: those of the last step, or those with the least loss of quality on the *choose* split
    (of our own models, the *valid* split) in one of about ten measurements, on the kind of examples that loses most."""
    start: Recovery | None = None
    """A recovery that runs first, each time. With None, training starts from the weights that pruning pruned."""

    def descent(self, usual: Descent) -> Descent:
        """Return the training of the dense model with these settings."""
        return replace(
            usual,
            steps=self.steps,
            learning_rate=self.learning_rate or usual.fine_tuning_rate,
            batch_size=self.batch_size or usual.batch_size,
            warmup_steps=min(usual.warmup_steps, self.steps // 10),
        )

    @property
    def why_only_ours(self) -> str:
        return "" if self.start is None else self.start.why_only_ours

    @property
    def extra_steps(self) -> int:
        return (self.steps if self.minutes is None else 0) + (0 if self.start is None else self.start.extra_steps)

    def starts_from(self, study: Study, pruned: Pruned) -> Any:
        return [pruned_digest(pruned), None if self.start is None else self.start.starts_from(study, pruned)]

    def __call__(
        self, study: Study, pruned: Pruned, draw: int, state: State | None, save: Callable[[State], None]
    ) -> tuple[Pruned, pd.DataFrame]:
        started = pruned if self.start is None else self.start(study, pruned, draw, None, lambda state: None)[0]
        model, descent, splits, objective = started.copied(), self.descent(study.training), study.splits, None
        if self.distillation:
            objective = partial(descent.distil, teacher=study.subject, share=self.distillation)
        if self.minutes is not None:
            steps = state["planned"] if state else self._planned(model, descent, splits, objective)
            descent, save = replace(self, steps=steps).descent(study.training), partial(_with_planned, save, steps)
        lost = None
        if self.keep == "best":
            every = max(1, round(descent.steps / EVALUATIONS))
            descent = replace(descent, evaluate_every=every, checkpoint_every=every)
            dense = measure(study.subject, splits.valid)
            lost = partial(largest_drop, dense=dense, examples=splits.valid)
        torch.manual_seed(study.seed)
        return model, descent(
            *(model, splits.train, splits.valid, None, study.seed, state, save, objective),
            lost=lost,
            dropout=self.dropout,
        )

    def _planned(self, model: Any, descent: Descent, splits: Splits[Any], objective: Objective | None) -> int:
        """Return how many steps fit into the time, beside the measurements. Raises ValueError if none does."""
        begun = time.perf_counter()
        measure(model, splits.valid)
        measured, seconds, tried = time.perf_counter() - begun, list[float](), model.copied()
        draw = torch.Generator().manual_seed(0)
        with descent.while_training(tried):
            optimisers = descent.optimisers(tried, None)
            for batch in islice(splits.train.shuffled_batches(descent.batch_size, draw), 2 + TIMED):
                begun = time.perf_counter()
                descent.step(tried, batch, optimisers, objective)
                seconds.append(time.perf_counter() - begun)
        left = 60 * float(self.minutes or 0) - sum(seconds) - (EVALUATIONS + 3) * measured
        if left < (each := sum(seconds[2:]) / TIMED):
            needed = f"{float(self.minutes or 0) + (each - left) / 60:.2g}"
            raise ValueError(f"minutes={self.minutes:g}: is too short to measure and train the model, must be {needed}")
        return round(left / each)


def _with_planned(save: Callable[[State], None], steps: int, state: State) -> None:
    """Save a state with the number of steps, which after a kill would be told anew, and be another."""
    save({**state, "planned": steps})
