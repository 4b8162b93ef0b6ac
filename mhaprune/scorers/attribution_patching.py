"""Score: the first-order estimate of patching."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from mhaprune.data import Data
from mhaprune.measure.outcomes import all_open, gate_gradients
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.replacing import corrupted
from mhaprune.settings.ranges import Ge
from mhaprune.subject import Subject


@dataclass(frozen=True)
class AttributionPatching(Scorer):
    """(c̃_n − c_n) · ∂ℓ/∂c_n, summed over tokens, the estimate of `patching` from two passes forward and one back for
    all heads (Nanda 2023; Syed et al. 2023). c_n is the output of the head, c̃_n that on the corrupt counterpart.

    With `steps` the derivative is the mean over points on the way from c to c̃, on which all heads move together
    (Hanna et al. 2024; Sundararajan et al. 2017). Then the scores add up to the rise of the loss with all heads
    replaced.
    """

    family: ClassVar[str] = "patching"
    signed: ClassVar[bool] = True

    replace: Literal["corrupt", "zero"] = "corrupt"
    """What c̃ is: the output on the corrupt counterpart, or zeros. With zeros the score estimates `ablation`."""
    steps: Annotated[int, Ge(1)] = 1
    """Number of points; the first is the example as it is."""

    @property
    def reads_pairs(self) -> bool:
        return self.replace == "corrupt"

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        # A head with the gate g outputs c̃ + g · (c - c̃). So the derivative in g is the score but for its sign.
        replacement = corrupted(examples) if self.reads_pairs else None
        points = all_open(subject, self.steps)
        points *= 1 - torch.arange(self.steps).to(points)[:, None] / self.steps
        values_SEN = -gate_gradients(subject, examples, points, replacement=replacement)
        return Scores.mean_over_examples(values_SEN.mean(dim=0), self.reads_pairs + self.steps, self.steps)
