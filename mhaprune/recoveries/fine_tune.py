"""Train a pruned model a little longer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import pandas as pd
import torch

from mhaprune.inputs import Study
from mhaprune.recoveries.base import Pruned, Recovery, State, pruned_digest
from mhaprune.settings.ranges import Ge, Gt, Within
from mhaprune.training.loop import Descent


@dataclass(frozen=True)
class FineTune(Recovery):
    """A recovery that trains the pruned model further.

    Warm-up takes at most a tenth of the steps. All other settings that are not listed here stay as they were in the
    training of the dense model. A pretrained model is trained by AdamW on its own loss, on the texts of `model.train`;
    if `model.train` is 0, on the *score* split. The learning rate warms up and decays to zero again. With `when=after`
    every pruned model is fine-tuned once. With `when=between` the model of one budget is fine-tuned before the heads
    for the next budget are chosen on it (Molchanov et al. 2017, figure 1).
    """

    steps: Annotated[int, Ge(1)] = 300
    """Number of optimiser steps."""
    learning_rate: Annotated[float | None, Gt(0)] = None
    """The highest learning rate, reached after warm-up. None means 1e-3, or 5e-5 for a pretrained model."""
    batch_size: Annotated[int | None, Ge(1)] = None
    """Number of examples per step. None means the number in the training of the dense model, or 16 for a pretrained
    model."""
    when: Literal["after", "between"] = "after"
    """The time of the fine-tuning: `after` all heads are removed, or also `between` two budgets."""
    distillation: Annotated[float, Within(0, 1)] = 0.0
    """The weight, 0 to 1, of the distillation loss in the objective (Hinton et al. 2015, at temperature 1). With 0 only
    the targets are trained on; see `Descent.distil`."""
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
        return self.steps + (0 if self.start is None else self.start.extra_steps)

    @property
    def between(self) -> bool:
        return self.when == "between"

    def starts_from(self, study: Study, pruned: Pruned) -> Any:
        return [pruned_digest(pruned), None if self.start is None else self.start.starts_from(study, pruned)]

    def __call__(
        self, study: Study, pruned: Pruned, draw: int, state: State | None, save: Callable[[State], None]
    ) -> tuple[Pruned, pd.DataFrame]:
        started = pruned if self.start is None else self.start(study, pruned, draw, None, lambda state: None)[0]
        model, descent, splits, objective = started.copied(), self.descent(study.training), study.splits, None
        if self.distillation:
            objective = partial(descent.distil, teacher=study.subject, share=self.distillation)
        torch.manual_seed(study.seed)
        return model, descent(model, splits.train, splits.valid, None, study.seed, state, save, objective)
