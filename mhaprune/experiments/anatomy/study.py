"""One call of the attention layer, tensor by tensor, and the effect of dividing scores by √d_head.

Dimensions: R = draws, U = keys, K = head_dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mhaprune.attention.layer import causal_bias
from mhaprune.data import PAD, Examples
from mhaprune.experiments.anatomy import report
from mhaprune.experiments.anatomy.walkthrough import LayerCall, largest_difference, steps_table, values_table, walk
from mhaprune.experiments.base import Experiment, Findings, Setup, with_proofs
from mhaprune.experiments.examples import check_examples, examples_table, shown_by
from mhaprune.heads import HeadGrid, HeadId, HeadMask, Site
from mhaprune.measure.outcomes import MAX_DIFFERENCE, ProofFailed
from mhaprune.model.transformer import Seq2Seq
from mhaprune.pruning.removal import EquivalenceCheck
from mhaprune.scorers.scoring import head_columns
from mhaprune.settings.ranges import Ge, Sizes
from mhaprune.studies.study import Study


@dataclass(frozen=True)
class Anatomy(Experiment):
    """One call of multi-head attention with all its numbers: tables `tensors`, `values`, `scaling`, `examples` and
    `training`.

    The call is followed step by step while the model answers an example. No scorer is needed. The run ends with
    `ProofFailed` if the layer, its steps and its separate heads disagree.
    """

    head: str | None = None
    """The head to follow, for example `cross.1.2`; by default the first one, in cross-attention if possible."""
    example: Annotated[int, Ge(0)] = 0
    """The number of the example to answer, in the report split, from 0. The run's own `example` replaces it."""
    head_dims: Sizes = (2, 4, 8, 16, 32, 64, 128, 256, 512)
    """The sizes of a head at which scores are compared with and without the division by √d_head."""

    needs_training = True
    reads_example = True
    question = "How does one call of multi-head attention work?"
    then = "`experiment=explain` shows what every head of the model looks at."
    figures = (report.life_of_the_tensors, report.scaling)
    say = staticmethod(report.say)

    def check(self, setup: Setup) -> None:
        self._followed(setup.grid)
        if setup.example is None and setup.recipe is not None:
            check_examples("example", (self.example,), setup.recipe.task.report)

    def __call__(self, study: Study) -> Findings:
        subject, splits = study.trained.network, study.trained.splits
        followed = self._followed(subject.grid)
        [shown] = shown_by(subject, study.trained, [self.example])
        call = call_in(subject, followed, shown.batch, splits.report[:64])
        steps, place = walk(call), subject.grid.index(followed) - subject.grid.positions(followed.block).start
        difference = largest_difference(call)
        if not difference <= MAX_DIFFERENCE:
            raise ProofFailed(
                f"a layer and its heads one by one differ by {difference:.3g}, allowed is {MAX_DIFFERENCE:g} in float64"
            )
        equivalence = EquivalenceCheck(subject, splits.proof)
        equivalence.prove(HeadMask(subject.grid).without(followed))
        tables = {
            "tensors": steps_table(steps),
            "values": values_table(steps, place).assign(**head_columns(followed), place=place),
            "scaling": scaling_table(self.head_dims),
            "examples": examples_table([shown], splits.train),
            **study.training_table,
        }
        return with_proofs(study, tables, equivalence.worst, max_difference_wide_independent=difference)

    def _followed(self, grid: HeadGrid) -> HeadId:
        """Return the head to follow. Raises ValueError if the model does not have it."""
        if self.head is None:
            if not len(grid):
                raise ValueError("model_file: has no heads left to follow, anatomy needs one")
            return min(grid, key=lambda head: (head.site != "cross", grid.index(head)))
        heads = {str(head): head for head in grid}
        if self.head not in heads:
            raise ValueError(
                f"experiment.head={self.head}: no such head, the model has {', '.join(heads) or 'none left'}"
            )
        return heads[self.head]


def call_in(subject: Seq2Seq, head: HeadId, example: Examples, some: Examples) -> LayerCall:
    """Return the layer of `head` with the inputs that it gets while the model writes `example`. The longest example of
    `some` is in the same batch, so that a shorter `example` is padded."""
    longest = int((some.source != PAD).sum(dim=1).argmax())
    rows = [(example.source[0], example.target[0]), (some.source[longest], some.target[longest])]
    batch = Examples(*(pad_sequence(list(ids), batch_first=True, padding_value=PAD) for ids in zip(*rows, strict=True)))
    sublayer, bias = subject.attention_sublayers()[head.block], subject.bias(batch.source)
    read: list[Tensor] = []
    handle = sublayer.norm.register_forward_hook(lambda norm, inputs, output: read.append(output))
    try:
        subject.call(batch)
    finally:
        handle.remove()
    [query] = read
    key = subject.encode(batch.source, bias) if head.site == Site.CROSS else query
    if head.site == Site.DECODER_SELF:
        bias = causal_bias(query.shape[1], key.shape[1], query.dtype, query.device)[None, None]
    return LayerCall(sublayer.attention, query, key, key, bias)


def softmax_gradient(weights: Tensor) -> Tensor:
    """Return the Frobenius norm of softmax's derivative, diag(a) − a aᵀ, at weights a (..., U): 0 for a weight of 1."""
    second, third = weights.square().sum(dim=-1), weights.pow(3).sum(dim=-1)
    return (second - 2 * third + second.square()).clamp(min=0).sqrt()


def scaling_table(head_dims: Sequence[int], num_keys: int = 10, draws: int = 400, seed: int = 0) -> pd.DataFrame:
    """Return two rows per d_head, with and without division by √d_head: statistics over `draws` random queries, each
    with `num_keys` keys. All components are standard normal, as in Vaswani et al. 2017, footnote 4.

    `score_std` is the standard deviation of the scores. `entropy` (nats) and `gradient` (see `softmax_gradient`) are
    medians with quartiles `_q1` and `_q3`, and means `_mean`.
    """
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for head_dim in head_dims:
        query_RK = torch.randn(draws, head_dim, generator=draw, dtype=torch.float64)
        keys_RUK = torch.randn(draws, num_keys, head_dim, generator=draw, dtype=torch.float64)
        scores_RU = torch.einsum("rk,ruk->ru", query_RK, keys_RUK)
        for scaled in (True, False):
            entering_RU = scores_RU / math.sqrt(head_dim) if scaled else scores_RU
            weights_RU = entering_RU.softmax(dim=-1)
            row: dict[str, float] = {"head_dim": head_dim, "scaled": scaled, "num_keys": num_keys, "draws": draws}
            row["score_std"] = float(entering_RU.std())
            entropy_R = -weights_RU.xlogy(weights_RU).sum(dim=-1)
            for name, values_R in (("entropy", entropy_R), ("gradient", softmax_gradient(weights_RU))):
                q1, median, q3 = np.quantile(values_R.numpy(), (0.25, 0.5, 0.75))
                row |= {name: median, f"{name}_q1": q1, f"{name}_q3": q3, f"{name}_mean": float(values_R.mean())}
            rows.append(row)
    return pd.DataFrame(rows)
