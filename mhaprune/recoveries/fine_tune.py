"""Train what is left a little longer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from mhaprune.data import PAD, Examples
from mhaprune.model.network import EncoderDecoder
from mhaprune.recoveries.base import Lesson, Recovery, State, left_digest

if TYPE_CHECKING:
    from mhaprune.model.transformer import Seq2Seq


@dataclass(frozen=True)
class FineTune(Recovery):
    """`steps` of the training that the model came from, at a peak `learning_rate` of its own, warmed up and decayed to
    zero again; the rest of its settings stay.

    `when=after` fine-tunes every pruned model from the weights it was left with. `when=between` goes through the
    budgets: the heads that go next are chosen on the model as it was fine-tuned before (Molchanov et al. 2017, figure
    1). `distillation` is the share of the objective that asks for the dense model's probabilities instead of the
    target (Hinton et al. 2015, at temperature 1).
    """

    steps: int = 300
    learning_rate: float = 1e-3
    when: Literal["after", "between"] = "after"
    distillation: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: must be 1 or more")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate}: must be above 0 and finite")
        if not 0 <= self.distillation <= 1:
            raise ValueError(f"distillation={self.distillation}: must be from 0 to 1")

    @property
    def extra_steps(self) -> int:
        return self.steps

    @property
    def between(self) -> bool:
        return self.when == "between"

    def starts_from(self, lesson: Lesson, left: Seq2Seq) -> Any:
        return left_digest(left)

    def __call__(
        self, lesson: Lesson, left: Seq2Seq, draw: int, state: State | None, save: Callable[[State], None]
    ) -> tuple[Seq2Seq, pd.DataFrame]:
        model = copy.deepcopy(left)
        warmup_steps = min(lesson.training.warmup_steps, self.steps // 10)
        training = replace(
            lesson.training, steps=self.steps, learning_rate=self.learning_rate, warmup_steps=warmup_steps
        )
        objective = None
        if self.distillation:
            objective = partial(distil, teacher=lesson.dense, share=self.distillation)
        torch.manual_seed(lesson.seed)
        splits = lesson.splits
        return model, training(model, splits.train, splits.valid, None, lesson.seed, state, save, objective)


def distil(model: EncoderDecoder, batch: Examples, teacher: EncoderDecoder, share: float) -> Tensor:
    """(1 - share) · cross-entropy + share · KL(teacher ‖ model), each the mean per target token in nats; the labels are
    not smoothed, the teacher does that."""
    with torch.no_grad():
        taught = teacher.logits(batch).log_softmax(dim=-1)
    said = model.logits(batch).log_softmax(dim=-1)
    valid = batch.target != PAD
    kl = F.kl_div(said[valid], taught[valid], reduction="sum", log_target=True) / valid.sum()
    own = F.nll_loss(said[valid], batch.target[valid])
    return (1 - share) * own + share * kl
