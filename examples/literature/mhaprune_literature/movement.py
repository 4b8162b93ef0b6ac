"""Score: how much training moves a head towards staying."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mhaprune_literature.gate_training import GatesOfSize


@dataclass(frozen=True)
class Movement(GatesOfSize):
    """The logit of the head after movement pruning with whole heads as blocks (Sanh et al. 2020; Lagunas et al. 2021).

    In each step the k heads with the highest logits are open and the others are closed. The derivative of the loss with
    respect to a gate counts as that of its logit, also for a closed gate (straight-through). So the logit of a head
    falls as long as the loss would fall if the head were weaker. k falls from all heads to `keep` along a cubic curve
    over the first half of the steps (Zhu & Gupta 2018).

    In the papers the weights are trained at the same time.
    """

    draws_by_head: ClassVar[bool] = False
    zero_if_silent: ClassVar[bool] = True

    def sample(self, logits_N: Tensor, batch: int, share: float, draw: torch.Generator) -> Tensor:
        heads, target = len(logits_N), self.heads_to_keep(len(logits_N))
        k = round(target + (heads - target) * max(0.0, 1 - 2 * share) ** 3)
        hard_N = torch.zeros_like(logits_N).index_fill(0, logits_N.topk(k).indices, 1.0)
        return (hard_N + (logits_N - logits_N.detach())).expand(batch, -1)
