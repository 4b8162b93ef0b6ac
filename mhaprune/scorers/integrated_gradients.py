"""What the head earns on the way from a model without heads to the whole one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from tqdm import tqdm

from mhaprune.data import Examples
from mhaprune.measure import all_open, gate_gradients
from mhaprune.ranges import Ge
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class IntegratedGradients(Scorer):
    """-∫₀¹ ∂ℓ/∂ξ_n dα along gates α·1 (Sundararajan et al. 2017; on attention Hao et al. 2021).

    The scores of all heads sum to the loss with all closed minus the loss with all open.
    """

    family: ClassVar[str] = "gradient"

    steps: Annotated[int, Ge(1)] = 20
    """Number of points of the midpoint rule."""

    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores:
        open_N = all_open(subject, 1)[0]
        total_EN = torch.zeros(len(examples), len(open_N), dtype=torch.double, device=open_N.device)
        for step in tqdm(range(self.steps), "integrated gradients", disable=None, leave=False):
            total_EN -= gate_gradients(subject, examples, (step + 0.5) / self.steps * open_N)
        return Scores.mean_over_examples(total_EN / self.steps, self.steps, self.steps)
