"""Score: how important a head is on the kind of examples that needs it most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class WorstKind(Scorer):
    """The highest of the scores that a head has on each kind of examples alone, so that no kind pays for the others.

    The kinds are compared in the unit of the score, such as nats.
    """

    scorer: Scorer
    """The score on each kind."""

    reads_pairs = property(lambda self: self.scorer.reads_pairs)

    def check(self, num_heads: int, gated: bool) -> None:
        self.scorer.check(num_heads, gated)

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        kinds = examples.by_kind()
        of_kinds = [self.scorer(subject, examples[rows], seed) for rows in kinds.values()]
        worst_RN = torch.stack([scores.values for scores in of_kinds]).argmax(dim=0)

        def of_worst(name: str) -> Tensor | None:
            found = [getattr(scores, name) for scores in of_kinds]
            return None if any(x is None for x in found) else torch.stack(found).gather(0, worst_RN[None])[0]

        values = torch.stack([scores.values for scores in of_kinds]).amax(dim=0)
        shares = [len(rows) / len(examples) for rows in kinds.values()]
        forward, backward = (
            sum(share * passes for share, passes in zip(shares, each, strict=True))
            for each in zip(*((scores.forward_passes, scores.backward_passes) for scores in of_kinds), strict=True)
        )
        return Scores(values, of_worst("stderr"), forward, backward, of_worst("skewness"))
