"""How much of the model's answer passes through the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from mhaprune.data import PAD, Examples
from mhaprune.measure import BATCH_SIZE, all_open
from mhaprune.ranges import Gt, Lt
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Lrp(Scorer):
    """The head's share in its block of the relevance for the top logits, by layer-wise relevance propagation with the
    ε-rule (Bach et al. 2015; for heads Voita et al. 2019, section 4).

    Relevance R_n of an example is summed over its tokens. Its sign says for or against; the share is |R_n| over the
    sum of its block, so that heads which cancel each other do not divide by nothing.
    """

    family: ClassVar[str] = "attention"

    epsilon: Annotated[float, Gt(0), Lt(1)] = 1e-3
    """The ε of the ε-rule. It keeps small denominators away from zero."""

    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores:
        relevant, shares = subject.with_relevance(self.epsilon), []
        for batch in examples.batches(BATCH_SIZE):
            gates_BN = all_open(subject, len(batch)).requires_grad_()
            top_BT = relevant.logits(batch, gates_BN).amax(dim=-1)
            top, no_heads = top_BT[batch.target != PAD].sum(), not len(subject.grid)
            (relevance_BN,) = torch.autograd.grad(top, gates_BN, allow_unused=no_heads, materialize_grads=no_heads)
            sizes = subject.grid.split(relevance_BN.double().abs()).values()
            shares.append(torch.cat([R_BH / R_BH.sum(dim=1, keepdim=True).clamp(min=1e-300) for R_BH in sizes], dim=1))
        return Scores.mean_over_examples(torch.cat(shares), 1, 1)
