"""Score: a trained choice of exactly k heads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mhaprune_literature.gate_training import Cooled, GatesOfSize


@dataclass(frozen=True)
class Subset(Cooled, GatesOfSize):
    """The logit of the head after differentiable subset pruning of the frozen model (Li, Cotterell & Sachan 2021).

    A relaxed Gumbel top-k (Xie & Ermon 2019) draws `keep` heads. Its temperature falls log-linearly. After the
    training, the heads with the highest logits are kept.
    """

    def sample(self, logits_N: Tensor, batch: int, share: float, draw: torch.Generator) -> Tensor:
        noise_BN = torch.rand(batch, len(logits_N), generator=draw, dtype=torch.double).clamp(1e-12, 1 - 1e-12)
        logits_BN = logits_N - (-noise_BN.log()).log().to(logits_N.device)
        return relaxed_top_k(logits_BN, self.heads_to_keep(len(logits_N)), self.temperature(share))


def relaxed_top_k(logits_BN: Tensor, k: int, temperature: float) -> Tensor:
    """Return gates (B, N) that sum to k. As the temperature falls to 0, the gates of the k highest logits become 1, and
    the others become 0.

    It computes in float64: in float32 it returns NaN below a temperature of about 0.1.
    """
    remaining_BN, gates_BN = logits_BN, torch.zeros_like(logits_BN)
    for _ in range(k):
        taken_BN = (remaining_BN / temperature).softmax(dim=-1)
        gates_BN = gates_BN + taken_BN
        remaining_BN = remaining_BN + (1 - taken_BN).clamp(min=1e-20).log()
    return gates_BN
