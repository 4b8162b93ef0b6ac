"""The control: a model of the pruned shape that is trained from random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import pandas as pd
import torch

from mhaprune.heads import HeadGrid, HeadId
from mhaprune.inputs import Study
from mhaprune.recoveries.base import Recovery, State
from mhaprune.settings.ranges import Ge


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

    @property
    def why_only_ours(self) -> str:
        return "trains as the model was trained"

    def starts_from(self, study: Study, pruned: Any) -> Any:
        return [list(pruned.grid.sizes), study.extra_steps]

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
        return model, training(model, study.splits.train, study.splits.valid, None, seed, state, save)
