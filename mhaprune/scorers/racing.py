"""Ablation that stops looking at heads whose fate is settled."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from mhaprune.data import Examples
from mhaprune.measure import all_open, measure_masks
from mhaprune.scorers.base import Budgeted, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Racing(Budgeted):
    """Ablation on growing batches, from which a head drops out once its side of the budget is settled (Maron & Moore
    1994; Bubeck et al. 2013).

    The first round takes `first` examples, each next one as many as all
    before it. After a round those heads are settled that differ from enough of the other contested heads, by a
    one-sided normal bound on the paired difference of their ablations; `confidence` is that of a single comparison.
    So heads far from the budget are scored on fewer examples; the order across the budget is that of the decisions.
    """

    family: ClassVar[str] = "ablation"

    confidence: float = 0.99
    first: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence={self.confidence}: must be above 0.5 and below 1")
        if self.first < 2:
            raise ValueError(f"first={self.first}: must be 2 or more examples")

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores:
        num_heads = len(subject.grid)
        keep = self.heads_to_keep(num_heads)
        order_E = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).to(
            examples.source.device
        )
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
