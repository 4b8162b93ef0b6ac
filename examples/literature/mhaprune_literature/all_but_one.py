"""Score: the loss with all other heads of the block closed."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mhaprune.data import Data
from mhaprune.measure.outcomes import all_open, measure_masks
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class AllButOne(Scorer):
    """Minus the mean loss if the head is the only open head of its block (Michel et al. 2019, section 3.3)."""

    family: ClassVar[str] = "ablation"
    zero_if_silent: ClassVar[bool] = False

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        gates_NN = all_open(subject, len(subject.grid))
        for block in subject.grid.blocks:
            heads = subject.grid.positions(block)
            gates_NN[heads.start : heads.stop, heads.start : heads.stop] = torch.eye(len(heads))
        loss_NE = measure_masks(subject, examples, gates_NN).loss
        return Scores.mean_over_examples(-loss_NE.T, forward_passes=len(subject.grid))
