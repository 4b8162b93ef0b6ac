"""Score: the entropy of the attention of the head."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mhaprune.data import Data
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.scorers.base import Scorer, Scores, TokenValues
from mhaprune.subject import Batch, Subject


@dataclass(frozen=True)
class Entropy(Scorer):
    """Minus the entropy, in nats, of the attention weights of a query token, averaged over all query tokens without
    padding (Michel et al. 2019, appendix)."""

    family: ClassVar[str] = "attention"
    reads_attention: ClassVar[bool] = True
    zero_if_silent: ClassVar[bool] = False

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        def negative_entropy(batch: Batch) -> TokenValues:
            maps, valid = subject.attention_maps(batch), subject.queries(batch)
            return [(seen.weights.xlogy(seen.weights).sum(dim=-1), valid[block]) for block, seen in maps.items()]

        return Scores.mean_over_tokens(map(negative_entropy, examples.batches(BATCH_SIZE)), forward_passes=1)
