"""Score: the gradient of the gate along a path from closed heads to open ones."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from mhaprune.data import Data
from mhaprune.measure.outcomes import all_open, gate_gradients
from mhaprune.progress import track
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.settings.ranges import Ge
from mhaprune.subject import Subject


@dataclass(frozen=True)
class IntegratedGradients(Scorer):
    """-∫₀¹ ∂ℓ/∂ξ_n dα along gates α·1 (Sundararajan et al. 2017; one layer at a time Hao et al. 2021).

    For heads that are scaled together, the scores sum to the loss with all of them closed minus the loss with all heads
    open.

    With `path=block`, this is the attention attribution of Hao et al., A ⊙ ∫₀¹ ∂F/∂A dα, summed over queries and keys:
    the output of a head is linear in its attention weights A, so at weights α·A the sum Σ A ⊙ ∂F/∂A is ∂F/∂ξ_n at gate
    α. Hao et al. rank heads by the largest entry of this attribution, not by its sum. Their F is a probability; here F
    is -ℓ.
    """

    family: ClassVar[str] = "gradient"

    path: Literal["block", "all"] = "block"
    """The gates that are scaled together. `block`: the gates of one block, while all other gates stay open. `all`: the
    gates of all blocks, so gradients come from models in which every head is partly closed."""
    steps: Annotated[int, Ge(1)] = 20
    """Number of points of the midpoint rule on each path. Each point takes one forward and one backward pass."""

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        open_N, grid = all_open(subject, 1)[0], subject.grid
        paths = [range(len(grid))] if self.path == "all" else [grid.positions(block) for block in grid.blocks]
        points = [(list(path), (step + 0.5) / self.steps) for path in paths if path for step in range(self.steps)]
        total_EN = torch.zeros(len(examples), len(grid), dtype=torch.double, device=open_N.device)
        for path, alpha in track(points, "points"):
            gates_N = open_N.clone()
            gates_N[path] = alpha
            total_EN[:, path] -= gate_gradients(subject, examples, gates_N)[:, path]
        return Scores.mean_over_examples(total_EN / self.steps, len(points), len(points))
