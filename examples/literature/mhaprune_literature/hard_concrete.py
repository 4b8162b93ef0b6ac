"""Score: the probability that a stochastic gate stays open, although an open gate is penalised."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from mhaprune.settings.ranges import Gt
from mhaprune_literature.gate_training import GatesOfSize

TEMPERATURE, STRETCH = 1 / 3, 0.1
LOGIT_BOUND = 4.6
"""The largest logit. Beyond it a gate is so certain that no gradient could change it."""


@dataclass(frozen=True)
class HardConcrete(GatesOfSize):
    """P(gate open) after training L0 gates on the frozen model (Louizos et al. 2018; for heads Voita et al. 2019).

    A gate is s = σ((log u - log(1-u) + a) / β), u uniform, stretched to [-0.1, 1.1], clipped to [0, 1]. The score is
    the mean of P(s > 0) over the second half of the steps.

    The loss has the penalty λ · (x + x²/2), where x is the expected number of open gates minus the number wanted. λ
    rises while x > 0 and falls while x < 0 (an augmented Lagrangian, after Wang et al. 2020). Each step multiplies λ
    (and does not add to it), because the importance of heads spans orders of magnitude. The number wanted falls from
    all heads to `keep` over the first half of the steps. With a fixed λ instead, the number of open gates would differ
    from model to model.
    """

    multiplier_rate: Annotated[float, Gt(0)] = 0.02
    """The speed at which λ changes: each step multiplies it by exp(`multiplier_rate` · x)."""

    start: ClassVar[float] = 2.0
    bound: ClassVar[float] = LOGIT_BOUND

    def sample(self, logits_N: Tensor, batch: int, share: float, draw: torch.Generator) -> Tensor:
        u_BN = torch.rand(batch, len(logits_N), generator=draw, dtype=torch.double).clamp(1e-6, 1 - 1e-6)
        return stretched(((u_BN.log() - (-u_BN).log1p()).to(logits_N.device) + logits_N) / TEMPERATURE)

    def penalty(self, logits_N: Tensor, share: float, multiplier: float) -> tuple[Tensor, float]:
        heads, target = len(logits_N), self.heads_to_keep(len(logits_N))
        wanted = target + (heads - target) * max(0.0, 1 - 2 * share)
        excess = probability_open(logits_N).sum() - wanted
        multiplier *= math.exp(self.multiplier_rate * float(excess.detach()))
        return multiplier * (excess + excess**2 / 2), multiplier

    def scores(self, path: Tensor) -> Tensor:
        # Of gates that end shut at the bound the last logits are equal: the mean knows which of them held out longer.
        return probability_open(path[len(path) // 2 :]).mean(dim=0)


def stretched(logits: Tensor) -> Tensor:
    return ((1 + 2 * STRETCH) * logits.sigmoid() - STRETCH).clamp(0.0, 1.0)


def probability_open(logits: Tensor) -> Tensor:
    """P(gate > 0), Louizos et al. 2018, equation 12."""
    return (logits - TEMPERATURE * math.log(STRETCH / (1 + STRETCH))).sigmoid()
