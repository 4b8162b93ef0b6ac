"""Scores: how concentrated the attention of the head is.

Dimensions: B = batch, H = heads of a block, T = queries.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.scorers.base import Scorer, Scores, TokenValues
from mhaprune.subject import AttentionMap, Batch, Subject


@dataclass(frozen=True)
class AttentionScorer(Scorer):
    """The mean over query tokens of a number that is computed from the attention weights of a query."""

    family: ClassVar[str] = "attention"
    reads_attention: ClassVar[bool] = True
    zero_if_silent: ClassVar[bool] = False

    @abstractmethod
    def of_queries(self, seen: AttentionMap, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of each head and query, (B, H, T), and the queries that count, (B, T). `valid_BT` is False
        on padding only."""

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        def of_batch(batch: Batch) -> TokenValues:
            maps, valid = subject.attention_maps(batch), subject.queries(batch)
            return [self.of_queries(seen, valid[block]) for block, seen in maps.items()]

        return Scores.mean_over_tokens(map(of_batch, examples.batches(BATCH_SIZE)), forward_passes=1)


@dataclass(frozen=True)
class Entropy(AttentionScorer):
    """Minus the entropy, in nats, of the attention weights of a query token, averaged over all query tokens without
    padding (Michel et al. 2019, appendix)."""

    def of_queries(self, seen: AttentionMap, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
        return seen.weights.xlogy(seen.weights).sum(dim=-1), valid_BT


@dataclass(frozen=True)
class Confidence(AttentionScorer):
    """The largest attention weight of each query token, averaged over the query tokens. The end of sequence counts
    neither as a query nor as a key (Voita et al. 2019, section 4)."""

    def of_queries(self, seen: AttentionMap, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
        return (seen.weights * seen.keys[:, None, None]).amax(dim=-1), seen.queries
