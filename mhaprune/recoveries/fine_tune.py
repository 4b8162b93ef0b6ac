"""Train a pruned model a little longer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import pandas as pd
import torch

from mhaprune.recoveries.base import Left, Recovery, RecoveryContext, ShortTraining, State, left_digest
from mhaprune.settings.ranges import Within


@dataclass(frozen=True)
class FineTune(ShortTraining, Recovery):
    """A recovery that trains the pruned model further.

    Warm-up takes at most a tenth of the steps. All other settings that are not listed here stay as they were in the
    training of the dense model. A pretrained model is trained by AdamW on its own loss, on the texts of `model.train`;
    if `model.train` is 0, on the *score* split. The learning rate warms up and decays to zero again. With `when=after`
    every pruned model is fine-tuned once. With `when=between` the model of one budget is fine-tuned before the heads
    for the next budget are chosen on it (Molchanov et al. 2017, figure 1).
    """

    when: Literal["after", "between"] = "after"
    """The time of the fine-tuning: `after` all heads are removed, or also `between` two budgets."""
    distillation: Annotated[float, Within(0, 1)] = 0.0
    """The weight, 0 to 1, of the distillation loss in the objective (Hinton et al. 2015, at temperature 1). With 0 only
    the targets are trained on; see `Descent.distil`."""
    start: Recovery | None = None
    """A recovery that runs first, each time. With None, training starts from the weights that pruning left."""

    @property
    def why_only_ours(self) -> str:
        return "" if self.start is None else self.start.why_only_ours

    @property
    def reads_wider(self) -> bool:
        return self.start is not None and self.start.reads_wider

    @property
    def extra_steps(self) -> int:
        return self.steps + (0 if self.start is None else self.start.extra_steps)

    @property
    def between(self) -> bool:
        return self.when == "between"

    def starts_from(self, lesson: RecoveryContext, left: Left) -> Any:
        return [left_digest(left), None if self.start is None else self.start.starts_from(lesson, left)]

    def __call__(
        self, lesson: RecoveryContext, left: Left, draw: int, state: State | None, save: Callable[[State], None]
    ) -> tuple[Left, pd.DataFrame]:
        started = left if self.start is None else self.start(lesson, left, draw, None, lambda state: None)[0]
        model, descent, splits, objective = started.copied(), self.descent(lesson), lesson.splits, None
        if self.distillation:
            objective = partial(descent.distil, teacher=lesson.dense, share=self.distillation)
        torch.manual_seed(lesson.seed)
        return model, descent(model, splits.train, splits.valid, None, lesson.seed, state, save, objective)
