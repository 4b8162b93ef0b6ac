"""What the model loses without the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from tqdm import tqdm

from mhaprune.data import Examples
from mhaprune.heads import HeadMask
from mhaprune.measure import mean_outputs, measure
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Ablation(Scorer):
    """Mean loss with the head closed minus mean loss with all open (Michel et al. 2019, section 3).

    `replace=zero` puts nothing in the place of the head's output, `replace=mean` its mean over all tokens of the
    split. The difference is taken example by example, so its standard error is that of a paired comparison.
    """

    replace: Literal["zero", "mean"] = "zero"

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores:
        fallback_NK = mean_outputs(subject, examples) if self.replace == "mean" else None
        open_E = measure(subject, examples).loss.double()
        everything = HeadMask(subject.grid)
        means, stderrs = [], []
        for head in tqdm(subject.grid, "ablation", disable=None, leave=False):
            gates_N = everything.without(head).gates(open_E.device)
            delta_E = measure(subject, examples, gates_N, fallback_NK).loss.double() - open_E
            means.append(delta_E.mean())
            stderrs.append(delta_E.std() / len(delta_E) ** 0.5)
        passes = 1 + len(subject.grid) + (fallback_NK is not None)
        return Scores(torch.stack(means)[None], torch.stack(stderrs)[None], passes)
