"""Score: the size of the weights."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mhaprune.data import Data
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Magnitude(Scorer):
    """‖W_V^n‖_F · ‖g_n O_n‖_F, the usual control of weight pruning. W_V^n makes the values of head n, O_n is the slice
    of W_O that reads the head, and g_n is its learned gate, if it has one."""

    family: ClassVar[str] = "weights"
    reads_examples: ClassVar[bool] = False

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        outputs_N, values_N = (
            torch.cat([weight_HKX.double().norm(dim=(1, 2)) for weight_HKX in weights.values()])
            for weights in (subject.output_weights(), subject.value_weights())
        )
        sizes_N = outputs_N * values_N
        gates_N = subject.learned_gates()
        return Scores((sizes_N if gates_N is None else sizes_N * gates_N.double().abs())[None])
