"""Score: how much the loss rises without the head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import BlockId
from mhaprune.measure.outcomes import Replacement, mean_outputs
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.replacing import rises
from mhaprune.subject import Batch, Fallback, Subject


@dataclass(frozen=True)
class Ablation(Scorer):
    """Mean loss with the head closed minus mean loss with all open (Michel et al. 2019, section 3).

    The difference is taken for each example, so its standard error is that of a paired comparison.
    """

    family: ClassVar[str] = "ablation"
    signed: ClassVar[bool] = True

    replace: Literal["zero", "mean", "resample"] = "zero"
    """The replacement for the output of a closed head: zeros; the mean of its output over all tokens of the split; or
    its output on another, randomly drawn example, position by position."""

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        replacement: Replacement | None = None
        passes = 1 + len(subject.grid)
        if self.replace == "mean":
            outputs = mean_outputs(subject, examples)
            replacement, passes = (lambda subject, batch, at: outputs), passes + 1
        elif self.replace == "resample":
            replacement, passes = resample(examples, seed), passes + 1
        return Scores.mean_over_examples(rises(subject, examples, replacement), passes)


def resample(examples: Data, seed: int) -> Replacement:
    """Return a replacement: for each example, the outputs of the heads on another, randomly drawn example of the split.
    Where the drawn example has no token, the output at its last token before is repeated."""
    if len(examples) < 2:
        raise ValueError("replace=resample: needs another example, the score split has one")
    draw = torch.Generator().manual_seed(seed)
    step_E = torch.randint(1, len(examples), (len(examples),), generator=draw)
    other_E = (torch.arange(len(examples)) + step_E) % len(examples)

    def replacement(subject: Subject, batch: Batch, at: Tensor) -> Fallback:
        drawn_B, lengths = other_E[at.cpu()], {block: real.shape[1] for block, real in subject.queries(batch).items()}
        parts = [repeated(subject, examples[own], lengths) for own in examples.passes(drawn_B, len(batch))]
        return {block: torch.cat([part[block] for part in parts]) for block in lengths}

    return replacement


def repeated(subject: Subject, donors: Batch, lengths: Mapping[BlockId, int]) -> dict[BlockId, Tensor]:
    """Return the outputs of the heads on these examples, (B, H, T, K) with T as given for each block. A place without a
    token holds the output at the last token before it, or at the first one."""
    valid, found = subject.queries(donors), dict[BlockId, Tensor]()
    for block, context_BHUK in subject.head_outputs(donors).items():
        places_U = torch.arange(context_BHUK.shape[2], device=context_BHUK.device)
        first_B1 = valid[block].int().argmax(dim=1, keepdim=True)
        last_BU = torch.where(valid[block], places_U, -1).cummax(dim=1).values.maximum(first_B1)
        place_BT = last_BU[:, torch.arange(lengths[block], device=last_BU.device).clamp(max=len(places_U) - 1)]
        _, H, _, K = context_BHUK.shape
        found[block] = context_BHUK.gather(2, place_BT[:, None, :, None].expand(-1, H, -1, K))
    return found
