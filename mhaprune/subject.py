"""The protocol through which scorers, schedules, measurements and speed see a model.

Dimensions: B = batch, T = positions, H = heads of a block, K = head_dim, D = model width, N = all heads, V =
vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

from torch import Tensor

from mhaprune.data import Examples
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


class HeadOutput(NamedTuple):
    """What the heads of one block put out: `context` (B, H, T, K) before gate and W_O; `valid` (B, T), False on
    padding."""

    context: Tensor
    valid: Tensor


class Subject(Protocol):
    """A model whose heads can be gated, observed and removed.

    `gates` are (N,) or (B, N) in the order of `grid`; 1 is open, 0 is closed. `fallback` (N, K) is what a closed head
    gives instead of nothing.
    """

    @property
    def grid(self) -> HeadGrid: ...

    def logits(self, batch: Examples, gates: Tensor | None = None, fallback: Tensor | None = None) -> Tensor:
        """(B, T, V) on the true prefixes; at padding anything."""
        ...

    def evaluate(self, batch: Examples, gates: Tensor | None = None, fallback: Tensor | None = None) -> Outcome: ...

    def head_outputs(self, batch: Examples) -> dict[Block, HeadOutput]:
        """What every head puts out with all gates open, block by block in the order of `grid`."""
        ...

    def output_weights(self) -> dict[Block, Tensor]:
        """O_n of each block, (H, K, D), in the order of `grid`: the slice of W_O that reads a head."""
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

    def predict(self, batch: Examples) -> Tensor:
        """What a user waits for; here greedy decoding, (B, tokens), as many steps as the targets are long."""
        ...

    def count_parameters(self) -> int: ...

    def count_flops(self, batch: Examples) -> int:
        """Floating-point operations of one `logits` call: two for each multiply-add of a matrix product."""
        ...
