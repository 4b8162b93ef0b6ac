"""Score: the average gain from adding the head to others.

Dimensions: N = all heads of the subject, M = masks, E = examples, P = pairs of permutations.
"""

from dataclasses import dataclass
from math import comb
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import all_open, measure_masks
from mhaprune.progress import doing, track
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.settings.ranges import Ge, Within
from mhaprune.subject import Subject

PAIRS_AT_ONCE = 8
MASKS_AT_ONCE = 1024
MOST_HEADS = 16
"""The largest number of heads for which all subsets can be run."""


@dataclass(frozen=True)
class Shapley(Scorer):
    """Shapley value of the head in the game v(S) = -mean loss with only the heads S open (Shapley 1953; for attention
    heads Held & Yang 2022). The scores sum to v(all) - v(none).

    If N is at most `exact_up_to` and all 2^N subsets fit into `evaluations`, the value is computed from all subsets,
    with a standard error over examples. Otherwise permutations are sampled (Castro et al. 2009) in pairs, one and its
    reverse, with a standard error over pairs.
    """

    family: ClassVar[str] = "game"
    draws_by_head: ClassVar[bool] = True

    evaluations: Annotated[int, Ge(1)] = 1000
    """The largest number of masks whose mean loss is measured. Sampling ends with the last pair of permutations that
    fits into this number. All subsets of 16 heads take 65536 evaluations."""
    exact_up_to: Annotated[int, Within(0, MOST_HEADS)] = MOST_HEADS
    """The largest number of heads for which all subsets are evaluated. They must also fit into `evaluations`. With 0,
    permutations are always sampled."""

    def check(self, num_heads: int, gated: bool) -> None:
        super().check(num_heads, gated)
        fewest = 2 + 2 * (num_heads - 1)
        if self.evaluations < fewest:
            raise ValueError(
                f"evaluations={self.evaluations}: one permutation of {num_heads} heads and its reverse take {fewest}"
            )

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        num_heads = len(subject.grid)
        self.check(num_heads, gated=subject.learned_gates() is not None)
        if not num_heads:
            return Scores(torch.zeros(1, 0).double())
        if num_heads <= self.exact_up_to and 2**num_heads <= self.evaluations:
            return _exact(subject, examples)
        draw = torch.Generator().manual_seed(seed)
        per_pair = max(1, 2 * (num_heads - 1))
        pairs = (self.evaluations - 2) // per_pair if num_heads > 1 else 1
        ends = all_open(subject, 2)
        ends[1] = 0.0
        all_value, none_value = -measure_masks(subject, examples, ends).loss.double().mean(dim=1)
        contributions: list[Tensor] = []
        with doing("coalitions", 2 + pairs * per_pair) as step:
            step.done += 2
            while len(contributions) < pairs:
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
                step.done += len(gates)
        values_PN = torch.stack(contributions)
        stderr_N = values_PN.std(dim=0) / len(values_PN) ** 0.5 if len(values_PN) > 1 else None
        evaluations = 2 + len(values_PN) * 2 * (num_heads - 1)
        return Scores(values_PN.mean(dim=0)[None], None if stderr_N is None else stderr_N[None], evaluations)


def _exact(subject: Subject, examples: Data) -> Scores:
    """Return the mean over examples of the Shapley values, computed from the losses under all subsets.

    The weight of a subset of s heads is 1 / (N · C(N-1, s-1)) for each of its heads, and -1 / (N · C(N-1, s)) for each
    other head.
    """
    num_heads = len(subject.grid)
    opened = all_open(subject, 1)
    counts = [0.0, *(1 / (num_heads * comb(num_heads - 1, others)) for others in range(num_heads)), 0.0]
    weights = torch.tensor(counts, dtype=torch.double, device=opened.device)
    places_N = torch.arange(num_heads - 1, -1, -1, device=opened.device)  # the last head changes first: long prefixes
    values_EN = torch.zeros(len(examples), num_heads, dtype=torch.double, device=opened.device)
    numbers = torch.arange(2**num_heads, device=opened.device).split(MASKS_AT_ONCE)
    for numbers_M in track(numbers, "coalitions"):
        open_MN = (numbers_M[:, None] >> places_N) & 1
        loss_ME = measure_masks(subject, examples, open_MN.to(opened)).loss.double()
        sizes_M1 = open_MN.sum(dim=1, keepdim=True)
        weights_MN = torch.where(open_MN.bool(), weights[sizes_M1], -weights[sizes_M1 + 1])
        values_EN -= loss_ME.T @ weights_MN
    return Scores.mean_over_examples(values_EN, 2**num_heads)
