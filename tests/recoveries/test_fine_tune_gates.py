"""A fine-tuning that chooses its heads, against a fine-tuning of the model without them."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.measure.outcomes import output_difference
from mhaprune.recoveries.base import RecoveryContext
from mhaprune.recoveries.fine_tune import FineTune
from mhaprune.recoveries.fine_tune_gates import FineTuneGates
from mhaprune.scorers.gate_training import TrainedGates
from mhaprune.scorers.hard_concrete import HardConcrete
from mhaprune.tasks.sort import Sort
from support.models import gated_model, lesson_of

CLOSED = [1, 2, 7, 11, 15, 16, 17]


@dataclass(frozen=True)
class Fixed(TrainedGates):
    """Some gates are shut from the first step on."""

    def sample(self, logits_N: Tensor, batch: int, share: float, draw: torch.Generator) -> Tensor:
        return torch.ones_like(logits_N).index_fill(0, torch.tensor(CLOSED), 0.0).expand(batch, -1) + 0 * logits_N

    def scores(self, path: Tensor) -> Tensor:
        assert len(path) == 4, "one entry for each step"
        return self.sample(path[-1], 1, 1.0, torch.Generator())[0]


@pytest.fixture
def lesson(task: Sort, splits: Splits) -> RecoveryContext:
    """Without learned gates, which only a model with all its heads could train further; by AdamW, which treats each
    weight by itself."""
    dense = gated_model(task)
    dense = dense.without(HeadMask(dense.grid))
    usual = lesson_of(dense, splits)
    return replace(usual, training=replace(usual.training, optimiser="adamw"))  # type: ignore[call-arg]


def recovered(recovery: Any, lesson: RecoveryContext, left: Any) -> Any:
    return recovery(lesson, left, 0, None, lambda state: None)[0]


def test_gates_that_are_shut_train_the_weights_of_the_smaller_model(lesson: RecoveryContext) -> None:
    grid = lesson.dense.grid
    gone = HeadMask(grid, frozenset(grid.heads[n] for n in CLOSED))
    chosen = recovered(FineTuneGates(steps=4, gates=Fixed(keep=len(grid) - len(CLOSED))), lesson, lesson.dense)
    tuned = recovered(FineTune(steps=4), lesson, lesson.dense.without(gone))
    assert chosen.grid == tuned.grid
    assert output_difference(chosen, tuned, lesson.splits.report) < 1e-9
    assert output_difference(chosen, lesson.dense.without(gone), lesson.splits.report) > 1e-3, "it does train"


def test_an_interrupted_one_goes_on_with_the_same_gates(lesson: RecoveryContext) -> None:
    """From a state of late in the training, when Adam knows its past."""
    recovery, states = FineTuneGates(steps=6, gates=HardConcrete(keep=6)), list[dict[str, Any]]()
    whole = recovery(lesson, lesson.dense, 0, None, lambda state: states.append(copy.deepcopy(state)))[0]
    (*_, late) = states
    resumed = recovery(lesson, lesson.dense, 0, copy.deepcopy(late), states.append)[0]
    assert resumed.grid == whole.grid
    assert output_difference(resumed, whole, lesson.splits.report) == 0.0


def test_heads_that_help_stay(lesson: RecoveryContext) -> None:
    """Heads whose W_O is a thousandth cannot help in a few steps, and are the first to be closed."""
    with torch.no_grad():
        for name, block in lesson.dense.by_name.items():
            columns = lesson.dense.module.get_submodule(block.out).weight.unflatten(1, (3, 4))
            columns[:, 0 if name.layer else 2] *= 1e-3
            columns[:, 1] *= 5
    gates = HardConcrete(keep=6, learning_rate=0.5)
    left = recovered(FineTuneGates(steps=60, learning_rate=1e-6, gates=gates), lesson, lesson.dense)
    assert len(left.grid) == 6
    assert sum(head.head == 1 for head in left.grid) >= 4
