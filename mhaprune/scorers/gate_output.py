"""Score: the size of the gated output."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from mhaprune.data import Data
from mhaprune.measure.outcomes import BATCH_SIZE, head_norms
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class GateOutput(Scorer):
    """g_n · mean over tokens of ‖c_n O_n‖₂: the learned gate g_n times the size of what it scales. c_n is the output of
    the head, and O_n the slice of W_O that reads it. Unlike g_n alone, the product is identifiable.

    For a model without gates, g_n = 1.
    """

    family: ClassVar[str] = "gate"

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        norms = (head_norms(subject, batch) for batch in examples.batches(BATCH_SIZE))
        scores = Scores.mean_over_tokens(norms, forward_passes=1)
        gates_N = subject.learned_gates()
        if gates_N is None or scores.stderr is None or scores.examples is None:
            return scores
        values, stderr, examples_EN = scores.values * gates_N, scores.stderr * gates_N, scores.examples * gates_N
        return replace(scores, values=values, stderr=stderr, examples=examples_EN)
