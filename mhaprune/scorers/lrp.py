"""Score: the relevance that flows through the head."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from mhaprune.data import Data
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.settings.ranges import Gt, Lt
from mhaprune.subject import CarriesRelevance, Subject


@dataclass(frozen=True)
class Lrp(Scorer):
    """The share of the head in the relevance of all heads of its block for the largest logit at each token, by
    layer-wise relevance propagation with the ε-rule (Bach et al. 2015; for heads Voita et al. 2019, section 4).

    The relevance R_n of an example is summed over its tokens. The share is |R_n| over the sum of |R| in its block:
    without absolute values, heads of opposite sign could sum to zero.
    """

    family: ClassVar[str] = "attention"
    needs: ClassVar[type | None] = CarriesRelevance

    epsilon: Annotated[float, Gt(0), Lt(1)] = 1e-3
    """The ε of the ε-rule. It keeps small denominators away from zero."""

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        if not isinstance(subject, CarriesRelevance):
            raise ValueError("needs layers that pass relevance back, which only mhaprune's own model has; leave it out")
        shares = []
        for batch in examples.batches(BATCH_SIZE):
            relevance_BN = subject.relevance(batch, self.epsilon)
            sizes = subject.grid.split(relevance_BN.double().abs()).values()
            shares.append(torch.cat([R_BH / R_BH.sum(dim=1, keepdim=True).clamp(min=1e-300) for R_BH in sizes], dim=1))
        return Scores.mean_over_examples(torch.cat(shares), 1, 1)
