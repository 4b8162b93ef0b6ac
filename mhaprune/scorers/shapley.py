"""What the head adds on average to the heads that came before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mhaprune.data import Examples
from mhaprune.measure import all_open, measure_masks
from mhaprune.ranges import Ge, Gt, Lt
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.statistics import bernstein_bound
from mhaprune.subject import Subject

PAIRS_AT_ONCE = 8


@dataclass(frozen=True)
class Shapley(Scorer):
    """Shapley value of the head in the game v(S) = -mean loss with only the heads S open, by sampled permutations
    (Castro et al. 2009; for attention heads Held & Yang 2022).

    Permutations come in antithetic pairs, one and its reverse. The scores sum to v(all) - v(none). The standard error
    is that of the sampling, over pairs.
    """

    family: ClassVar[str] = "game"
    draws_by_head: ClassVar[bool] = True

    evaluations: Annotated[int, Ge(1)] = 1000
    """The largest number of evaluations of v. Sampling ends with the last pair that fits into it."""
    bound: Annotated[float, Ge(0)] = 0.0
    """Sampling ends sooner once every head is known to ± `bound` nats, by an empirical Bernstein bound (Audibert et al.
    2009) with the range of the contributions seen. 0 uses all evaluations."""
    confidence: Annotated[float, Gt(0), Lt(1)] = 0.95
    """The confidence of that bound, for all heads and looks together."""

    def check(self, num_heads: int, gated: bool) -> None:
        super().check(num_heads, gated)
        fewest = 2 + 2 * (num_heads - 1)
        if self.evaluations < fewest:
            raise ValueError(
                f"evaluations={self.evaluations}: one permutation of {num_heads} heads and its reverse take {fewest}"
            )

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores:
        num_heads = len(subject.grid)
        self.check(num_heads, gated=subject.learned_gates() is not None)
        if not num_heads:
            return Scores(torch.zeros(1, 0).double())
        draw = torch.Generator().manual_seed(seed)
        per_pair = max(1, 2 * (num_heads - 1))
        pairs = (self.evaluations - 2) // per_pair if num_heads > 1 else 1
        ends = all_open(subject, 2)
        ends[1] = 0.0
        all_value, none_value = -measure_masks(subject, examples, ends).loss.double().mean(dim=1)
        contributions: list[Tensor] = []
        with tqdm(total=2 + pairs * per_pair, desc="shapley", disable=None, leave=False) as progress:
            progress.update(2)
            while len(contributions) < pairs and not self._settled(contributions, pairs):
                orders = [torch.randperm(num_heads, generator=draw) for _ in range(min(PAIRS_AT_ONCE, pairs))]
                orders = orders[: pairs - len(contributions)]
                both = [one for order in orders for one in (order, order.flip(0))]
                # In the i-th coalition of a permutation the first i+1 of its heads are open.
                gates = [(order.argsort() <= i).to(ends) for order in both for i in range(num_heads - 1)]
                inner = torch.empty(0, dtype=torch.double, device=ends.device)
                if gates:
                    inner = -measure_masks(subject, examples, torch.stack(gates)).loss.double().mean(dim=1)
                inner = inner.view(len(both), num_heads - 1)
                start, end = none_value.expand(len(both), 1), all_value.expand(len(both), 1)
                gains = torch.cat([start, inner, end], dim=1).diff(dim=1)
                by_head = torch.stack([gain[order.argsort()] for gain, order in zip(gains, both, strict=True)])
                contributions += by_head.view(-1, 2, num_heads).mean(dim=1).unbind()
                progress.update(len(gates))
        values_PN = torch.stack(contributions)
        stderr_N = values_PN.std(dim=0) / len(values_PN) ** 0.5 if len(values_PN) > 1 else None
        evaluations = 2 + len(values_PN) * 2 * (num_heads - 1)
        return Scores(values_PN.mean(dim=0)[None], None if stderr_N is None else stderr_N[None], evaluations)

    def _settled(self, contributions: list[Tensor], pairs: int) -> bool:
        if self.bound == 0 or len(contributions) < 2:
            return False
        values_PN = torch.stack(contributions).cpu().numpy()
        looks = -(-pairs // PAIRS_AT_ONCE)
        confidence = 1 - (1 - self.confidence) / (looks * values_PN.shape[1])
        halves_N = bernstein_bound(values_PN.var(axis=0), np.ptp(values_PN, axis=0), len(values_PN), confidence)
        return bool((halves_N <= self.bound).all())
