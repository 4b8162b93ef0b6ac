"""Score: the largest attention weight of the head."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mhaprune.data import Data
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.scorers.base import Scorer, Scores, TokenValues
from mhaprune.subject import Batch, Subject


@dataclass(frozen=True)
class Confidence(Scorer):
    """The largest attention weight of each query token, averaged over the query tokens. The end of sequence counts
    neither as a query nor as a key (Voita et al. 2019, section 4)."""

    family: ClassVar[str] = "attention"
    reads_attention: ClassVar[bool] = True
    zero_if_silent: ClassVar[bool] = False

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        def largest(batch: Batch) -> TokenValues:
            maps = subject.attention_maps(batch).values()
            return [((seen.weights * seen.keys[:, None, None]).amax(dim=-1), seen.queries) for seen in maps]

        return Scores.mean_over_tokens(map(largest, examples.batches(BATCH_SIZE)), forward_passes=1)
