"""Train a model further and choose its heads in the same training."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pandas as pd
import torch
from torch import Tensor

from mhaprune.heads import HeadMask
from mhaprune.recoveries.base import Chooser, Left, RecoveryContext, ShortTraining, State, left_digest
from mhaprune.scorers.gate_training import GateTraining, TrainedGates
from mhaprune.scorers.movement import Movement
from mhaprune.subject import Batch


@dataclass(frozen=True)
class FineTuneGates(ShortTraining, Chooser):
    """A fine-tuning of the whole model that trains one gate per head together with the weights, and ends with the heads
    of the highest scores.

    The gates are those of any scorer that trains gates: movement pruning with heads as blocks (Lagunas et al. 2021), L0
    gates (Louizos et al. 2018; CoFi, Xia et al. 2022, for heads only and without its distillation of layers), subset
    gates (Li et al. 2021). The gates have an optimiser and a learning rate of their own. Half of the steps close heads,
    the other half train with about as many heads as are kept.
    """

    gates: TrainedGates = field(default_factory=Movement)
    """The scorer whose gates are trained. Its `steps` and `batch_size` do not matter here."""

    def keeping(self, heads: int) -> Self:
        return replace(self, gates=self.gates.keeping(heads))

    def starts_from(self, lesson: RecoveryContext, left: Left) -> Any:
        return left_digest(left)

    @property
    def extra_steps(self) -> int:
        return self.steps

    def __call__(
        self, lesson: RecoveryContext, left: Left, draw: int, state: State | None, save: Callable[[State], None]
    ) -> tuple[Left, pd.DataFrame]:
        model, descent, splits, heads = left.copied(), self.descent(lesson), lesson.splits, len(left.grid)
        gates = GateTraining(self.gates, heads, self.steps, lesson.seed, left.device)
        if state is not None:
            gates.restore(state["gates"])

        def objective(model: Left, batch: Batch) -> Tensor:
            gates.descend()  # by the backward pass of the step before, which was one for weights and gates
            with model.gated(len(batch), gates.sample(len(batch)).to(model.dtype)):
                return descent.objective(model, batch) + gates.penalty()

        def saved(state: State) -> None:
            save(state | {"gates": gates.state()})

        torch.manual_seed(lesson.seed)
        history = descent(model, splits.train, splits.valid, None, lesson.seed, state, saved, objective)
        gates.descend()
        scores = gates.scores().tolist()
        worst = sorted(range(heads), key=scores.__getitem__)[: heads - self.gates.heads_to_keep(heads)]
        return model.without(HeadMask(model.grid, frozenset(model.grid.heads[n] for n in worst))), history
