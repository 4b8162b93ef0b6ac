"""The learned gate itself."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mhaprune.data import Data
from mhaprune.scorers.base import NEEDS_GATES, Scorer, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Gate(Scorer):
    """The learned gate g_n: the weight that training gave to the head in its block (an exercise in section 11.5 of
    d2l.ai).

    The scale of a gate is not identifiable: (g·c, O) and (c, g·O) are the same function. `gate_output` does not have
    this problem.
    """

    family: ClassVar[str] = "gate"
    reads_examples: ClassVar[bool] = False
    needs_gates: ClassVar[bool] = True
    zero_if_silent: ClassVar[bool] = False

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        gates_N = subject.learned_gates()
        if gates_N is None:
            raise ValueError(NEEDS_GATES)
        return Scores(gates_N[None])
