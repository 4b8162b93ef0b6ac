"""The protocol through which scorers, schedules, measurements and speed see a model.

Dimensions: B = batch, T = positions, H = heads of a block, K = head_dim, D = model width, N = all heads, V =
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

from mhaprune.data import PAD, Examples
from mhaprune.heads import Block, HeadGrid, HeadMask


class Outcome(NamedTuple):
    """How a model does on each example of a batch, (B,) each.

    `loss` is the mean cross-entropy in nats over the example's target tokens, padding excluded; `token_accuracy` the
    share of them that the model ranks first given the true prefix; `sequence_accuracy` 1 where it ranks all of them
    first. That last one *is* exact match under greedy decoding: greedy decoding follows the true prefix for as long
    as it has made no mistake.
    """

    loss: Tensor
    token_accuracy: Tensor
    sequence_accuracy: Tensor

    @classmethod
    def of(cls, logits: Tensor, target: Tensor) -> Self:
        """That of logits (..., T, V) on targets (..., T)."""
        valid = target != PAD
        lengths = valid.sum(dim=-1)
        loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=PAD, reduction="none")
        hits = ((logits.argmax(dim=-1) == target) & valid).sum(dim=-1)
        exact = hits == lengths
        return cls(loss.view_as(target).sum(dim=-1) / lengths, hits.to(loss.dtype) / lengths, exact.to(loss.dtype))


class AttentionMap(NamedTuple):
    """What the heads of one block look at.

    `weights` (B, H, T, U) sum to 1 over the keys U; `queries` (B, T) and `keys` (B, U) are False on padding and on end
    of sequence.
    """

    weights: Tensor
    queries: Tensor
    keys: Tensor


Gates = Tensor | Mapping[Block, Tensor]
"""(N,) or (B, N) in the order of the grid, or one for every token, (B, H, T) for each block; 1 is open, 0 is closed."""

Fallback = Mapping[Block, Tensor]
"""What replaces the output of a closed head: for each block a tensor that broadcasts to (B, H, T, K)."""


class Evaluated(Protocol):
    """A model that can be measured; training needs no more of it."""

    def evaluate(self, batch: Examples, gates: Gates | None = None, fallback: Fallback | None = None) -> Outcome: ...


class Subject(Protocol):
    """A model whose heads can be gated, observed and removed."""

    @property
    def grid(self) -> HeadGrid: ...

    def logits(self, batch: Examples, gates: Gates | None = None, fallback: Fallback | None = None) -> Tensor:
        """(B, T, V) on the true prefixes; at padding anything."""
        ...

    def evaluate(self, batch: Examples, gates: Gates | None = None, fallback: Fallback | None = None) -> Outcome:
        """Differentiable in the gates."""
        ...

    def queries(self, batch: Examples) -> dict[Block, Tensor]:
        """(B, T) for each block in the order of `grid`: True at the positions that its heads write to, False on
        padding."""
        ...

    def head_outputs(self, batch: Examples) -> dict[Block, Tensor]:
        """The output of every head with all gates open, before gate and W_O: (B, H, T, K) for each block."""
        ...

    def attention_maps(self, batch: Examples) -> dict[Block, AttentionMap]:
        """What every head looks at with all gates open, block by block in the order of `grid`."""
        ...

    def output_weights(self) -> dict[Block, Tensor]:
        """O_n of each block, (H, K, D), in the order of `grid`: the slice of W_O that reads a head."""
        ...

    def value_weights(self) -> dict[Block, Tensor]:
        """W_V^n of each block, (H, K, width of what the values are made from), in the order of `grid`."""
        ...

    def learned_gates(self) -> Tensor | None:
        """(N,), or None for a model that has none."""
        ...

    def without(self, mask: HeadMask) -> Self:
        """A copy with the masked heads really gone and learned gates folded into the weights."""
        ...

    def in_double(self) -> Self:
        """A copy that computes in float64, where rounding cannot be mistaken for a difference."""
        ...

    def with_relevance(self, epsilon: float) -> Self:
        """A copy with the same outputs whose gradients carry relevance: there, the derivative of a logit with respect
        to a gate is the relevance of the head for that logit, by layer-wise relevance propagation with the ε-rule."""
        ...

    def predict(self, batch: Examples) -> Tensor:
        """What a user waits for; here greedy decoding, (B, tokens), as many steps as the targets are long."""
        ...

    def count_parameters(self) -> int: ...

    def count_flops(self, batch: Examples) -> int:
        """Floating-point operations of one `logits` call: two for each multiply-add of a matrix product."""
        ...


@runtime_checkable
class SharesPrefixes(Protocol):
    """A subject that runs many masks on one batch faster than one after the other."""

    def evaluate_masks(self, batch: Examples, gates: Tensor, fallback: Fallback | None = None) -> Outcome:
        """What `evaluate` returns for every row of `gates` (M, N): (M, B) each, equal up to rounding."""
        ...
