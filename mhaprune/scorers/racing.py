"""Ablation that stops looking at heads whose fate is settled."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure import all_open, measure_masks
from mhaprune.scorers.base import Budgeted, Scores
from mhaprune.settings.ranges import Ge, Gt, Lt
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Racing(Budgeted):
    """Ablation on growing batches. A head drops out once it is settled whether it stays or goes (Maron & Moore 1994;
    Bubeck et al. 2013).

    Each round takes as many examples as all rounds before it. Then two contested heads are compared by a one-sided
    normal bound on the paired difference of their ablations. A head is settled when it differs from enough of the
    others. So heads far from the budget are scored on fewer examples. Scores are raised where they must be, so that
    each head that stays scores higher than each head that goes.
    """

    family: ClassVar[str] = "ablation"

    confidence: Annotated[float, Gt(0.5), Lt(1)] = 0.99
    """The confidence of a single comparison of two heads."""
    first: Annotated[int, Ge(2)] = 32
    """Number of examples of the first round."""

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        num_heads = len(subject.grid)
        keep = self.heads_to_keep(num_heads)
        order_E = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).to(examples.device)
        means_N, stderr_N = torch.zeros(num_heads).double(), torch.zeros(num_heads).double()
        removed: list[int] = []
        kept: list[int] = []
        contested = list(range(num_heads))
        deltas_EN = torch.empty(0, num_heads).double()
        seen, masks_run = 0, 0
        while seen < len(examples) and contested:
            new = examples[order_E[seen : max(self.first, 2 * seen)]]
            gates_MN = all_open(subject, 1 + len(contested))
            gates_MN[torch.arange(1, len(gates_MN)), contested] = 0.0
            loss_ME = measure_masks(subject, new, gates_MN).loss.double().cpu()
            fresh_EN = torch.zeros(len(new), num_heads).double()
            fresh_EN[:, contested] = (loss_ME[1:] - loss_ME[0]).T
            deltas_EN = torch.cat([deltas_EN, fresh_EN])
            seen, masks_run = seen + len(new), masks_run + len(new) * len(gates_MN)
            mine_EC = deltas_EN[:, contested]
            means_N[contested], stderr_N[contested] = mine_EC.mean(0), mine_EC.std(0) / seen**0.5
            to_go, to_stay = self._settled(mine_EC, keep - len(kept))
            removed += [contested[i] for i in to_go]
            kept += [contested[i] for i in to_stay]
            contested = [n for i, n in enumerate(contested) if i not in {*to_go, *to_stay}]
        contested.sort(key=lambda n: float(means_N[n]))
        removed += contested[: num_heads - keep - len(removed)]
        if removed and len(removed) < num_heads:
            stays = torch.tensor([n not in removed for n in range(num_heads)])
            edge = means_N[~stays].max()
            means_N = torch.where(stays, means_N.maximum(edge.nextafter(edge + 1)), means_N)
        return Scores(means_N[None], stderr_N[None], masks_run / len(examples))

    def _settled(self, deltas_EC: Tensor, keep: int) -> tuple[list[int], list[int]]:
        """Which of the contested heads, by their place, surely go and surely stay when `keep` of them stay."""
        count = deltas_EC.shape[1]
        covariance = torch.atleast_2d(deltas_EC.T.cov())
        variance = covariance.diagonal()
        spread_CC = (variance[:, None] + variance - 2 * covariance).clamp(min=0).sqrt() / len(deltas_EC) ** 0.5
        mean_C = deltas_EC.mean(dim=0)
        above_CC = mean_C[:, None] - mean_C - NormalDist().inv_cdf(self.confidence) * spread_CC > 0
        stays_C, goes_C = above_CC.sum(dim=1) >= count - keep, above_CC.sum(dim=0) >= keep
        return goes_C.nonzero().flatten().tolist(), stays_C.nonzero().flatten().tolist()
