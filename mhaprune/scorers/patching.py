"""Score: how much the loss rises with the head's output on a corrupt input."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mhaprune.data import Data
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.replacing import corrupted, rises
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Patching(Scorer):
    """Mean loss with the output of the head replaced by its output on the corrupt counterpart of the example, position
    by position, minus mean loss (activation patching: Vig et al. 2020; Zhang & Nanda 2024).

    The counterpart lacks the thing asked about, so the score is what the head brings to that. It is signed: without a
    head below 0 the model does better.
    """

    family: ClassVar[str] = "patching"
    signed: ClassVar[bool] = True
    reads_pairs = True

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        return Scores.mean_over_examples(rises(subject, examples, corrupted(examples)), 2 + len(subject.grid))
