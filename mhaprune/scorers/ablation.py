"""Score: how much the loss rises without the head."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import Block
from mhaprune.measure.outcomes import Replacement, all_open, mean_outputs, measure_masks
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.prediction import PASSES, Prediction
from mhaprune.subject import Batch, Fallback, Subject


@dataclass(frozen=True)
class Ablation(Scorer):
    """Mean loss with the head closed minus mean loss with all open (Michel et al. 2019, section 3).

    The difference is taken for each example, so its standard error is that of a paired comparison.
    """

    family: ClassVar[str] = "ablation"

    replace: Literal["zero", "mean", "resample", "predicted"] = "zero"
    """The replacement for the output of a closed head: zeros; the mean of its output over all tokens of the split; its
    output on another, randomly drawn example, position by position; or a prediction from the other heads of its block.
    A prediction gives the loss that a refit of W_O for the other heads would give."""

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        num_heads = len(subject.grid)
        gates_MN = all_open(subject, 1 + num_heads)
        gates_MN[1:].fill_diagonal_(0.0)
        replacement: Replacement | None = None
        passes = 1 + num_heads
        if self.replace == "mean":
            outputs = mean_outputs(subject, examples)
            replacement, passes = (lambda subject, batch, at: outputs), passes + 1
        elif self.replace == "resample":
            replacement, passes = resample(examples, seed), passes + 1
        elif self.replace == "predicted":
            replacement, passes = predicted(subject, examples), passes + PASSES + 1
        loss_ME = measure_masks(subject, examples, gates_MN, replacement).loss.double()
        return Scores.mean_over_examples((loss_ME[1:] - loss_ME[0]).T, passes)


def predicted(subject: Subject, examples: Data, ridge: float = 1e-3) -> Replacement:
    """Return a replacement: for each head, its prediction from the other heads of its block by a ridge regression,
    fitted to the split."""
    prediction = Prediction.fit(subject, examples, ridge)

    def replacement(subject: Subject, batch: Batch, at: Tensor) -> Fallback:
        outputs = subject.head_outputs(batch)
        missed = prediction.missed(outputs)
        return {block: context_BHTK - missed[block] for block, context_BHTK in outputs.items()}

    return replacement


def resample(examples: Data, seed: int) -> Replacement:
    """Return a replacement: for each example, the outputs of the heads on another, randomly drawn example of the split.
    If the drawn example is shorter, the output at its last token is repeated."""
    if len(examples) < 2:
        raise ValueError("replace=resample: needs another example, the score split has one")
    draw = torch.Generator().manual_seed(seed)
    step_E = torch.randint(1, len(examples), (len(examples),), generator=draw)
    other_E = (torch.arange(len(examples)) + step_E) % len(examples)

    def replacement(subject: Subject, batch: Batch, at: Tensor) -> Fallback:
        donors = examples[other_E.to(at.device)[at]]
        valid, positions = subject.queries(donors), subject.queries(batch)
        fallback: dict[Block, Tensor] = {}
        for block, context_BHTK in subject.head_outputs(donors).items():
            last_B1 = valid[block].sum(dim=1, keepdim=True) - 1
            place_BT = torch.arange(positions[block].shape[1], device=at.device).minimum(last_B1)
            _, H, _, K = context_BHTK.shape
            fallback[block] = context_BHTK.gather(2, place_BT[:, None, :, None].expand(-1, H, -1, K))
        return fallback

    return replacement
