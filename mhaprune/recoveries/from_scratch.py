"""The control: a model of the pruned shape that is trained from random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import pandas as pd
import torch

from mhaprune.heads import HeadGrid, HeadId
from mhaprune.inputs import Study
from mhaprune.recoveries.base import Pruned, Recovery, State
from mhaprune.settings.ranges import Ge, Within
from mhaprune.storage.cache import weights_digest


@dataclass(frozen=True)
class FromScratch(Recovery):
    """A model of the pruned shape, trained from random weights (Voita et al. 2019, section 6.3; Liu et al. 2019).

    It has as many heads in each block as the pruned model, and trains for as many steps as the dense model and its
    fine-tuning together. It has no learned gates, because the learned gates of the pruned model are folded into the
    weights too.
    """

    control: ClassVar[bool] = True

    draws: Annotated[int, Ge(1)] = 3
    """Number of models to train, each from different random weights."""
    distillation: Annotated[float, Within(0, 1)] = 0.0
    """The weight, 0 to 1, of the distillation loss in the objective: the small model learns from the answers of the
    dense one, too. See `Descent.distil`."""

    @property
    def why_only_ours(self) -> str:
        return "trains as the model was trained"

    def starts_from(self, study: Study, pruned: Any) -> Any:
        teacher: Pruned = study.subject
        taught_by = [weights_digest(teacher.module)] if self.distillation else []
        return [list(pruned.grid.sizes), study.extra_steps, *taught_by]

    def __call__(
        self, study: Study, pruned: Any, draw: int, state: State | None, save: Callable[[State], None]
    ) -> tuple[Any, pd.DataFrame]:
        sizes = zip(pruned.grid.blocks, pruned.grid.sizes, strict=True)
        left = (HeadId(block.site, block.layer, n) for block, size in sizes for n in range(size))
        grid = HeadGrid(pruned.grid.blocks, tuple(left))
        # Far from the seeds that people give to runs: the dense model itself should be no draw.
        seed = 1_000_003 * (study.seed + 1) + draw
        torch.manual_seed(seed)
        vocabulary_size, device = pruned.output.out_features, pruned.positions.device
        model = type(pruned)(pruned.config, vocabulary_size, None, grid).to(device)
        training = replace(study.training, steps=study.training.steps + study.extra_steps)
        objective = None
        if self.distillation:
            objective = partial(training.distil, teacher=study.subject, share=self.distillation)
        splits = study.splits
        return model, training(model, splits.train, splits.valid, None, seed, state, save, objective)
