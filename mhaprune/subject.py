"""The protocol through which scorers, schedules, measurements and speed see a model.

Dimensions: B = batch, T = positions, H = heads of a block, K = head_dim, D = model width, N = all heads, V =
vocabulary.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from mhaprune.data import PAD
from mhaprune.heads import Block, HeadGrid, HeadMask


class Outcome(Protocol):
    """The result of a model on each example of a batch, (B,) each, as a NamedTuple.

    It exists so that every model is judged by a quality of its own: exact match for our tasks; accuracy, agreement or
    one minus drift for others. The fields are columns of tables, and nothing here is ever the mean of a batch.
    """

    @property
    def loss(self) -> Tensor:
        """The loss, in nats for a likelihood; lower is better."""
        ...

    @property
    def quality(self) -> Tensor:
        """The quality; higher is better, at most 1."""
        ...

    def _asdict(self) -> dict[str, Tensor]: ...

    def __iter__(self) -> Iterator[Tensor]: ...


class AnswerOutcome(NamedTuple):
    """The result of a sequence-to-sequence model on each example.

    `loss` is the mean cross-entropy in nats over the example's target tokens, padding excluded; `token_accuracy` the
    share of them that the model ranks first given the true prefix; `quality` 1 where it ranks all of them first. That
    last one *is* exact match under greedy decoding: greedy decoding follows the true prefix for as long as it has made
    no mistake.
    """

    loss: Tensor
    token_accuracy: Tensor
    quality: Tensor

    @classmethod
    def of(cls, logits: Tensor, target: Tensor) -> Self:
        """Judge logits (..., T, V) against targets (..., T)."""
        valid = target != PAD
        lengths = valid.sum(dim=-1)
        loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=PAD, reduction="none")
        hits = ((logits.argmax(dim=-1) == target) & valid).sum(dim=-1)
        exact = hits == lengths
        return cls(loss.view_as(target).sum(dim=-1) / lengths, hits.to(loss.dtype) / lengths, exact.to(loss.dtype))


class AttentionMap(NamedTuple):
    """The attention weights of one block.

    `weights` (B, H, T, U) sum to 1 over the keys U; `queries` (B, T) and `keys` (B, U) are False on padding and on end
    of sequence.
    """

    weights: Tensor
    queries: Tensor
    keys: Tensor


class LastMap(NamedTuple):
    """The linear map that ends a sublayer, and what passes through it: the sublayer adds to the residual stream what
    the map makes of its inputs."""

    name: str
    """That of the attention block or of the feed-forward part."""
    feed_forward: bool
    """Whether it ends a feed-forward part; else it is the W_O of an attention block."""
    weight: Tensor
    """(D, W). It may be written to."""
    bias: Tensor | None
    """(D,). It may be written to."""
    parts: Sequence[tuple[Tensor, Tensor]]
    """For each batch what the map reads, (tokens, W), and the residual stream after the sublayer, (tokens, D); padding
    is left out. W is 0 for a block without heads."""


Gates = Tensor | Mapping[Block, Tensor]
"""(N,) or (B, N) in the order of the grid, or one for every token, (B, H, T) for each block; 1 is open, 0 is closed."""

Batch = Any
"""Some of the examples, of the type of `Data` that the model reads: `Examples` for our own."""

Fallback = Mapping[Block, Tensor]
"""What replaces the output of a closed head: for each block a tensor that broadcasts to (B, H, T, K)."""


class Evaluated(Protocol):
    """A model that can be measured; training needs no more of it."""

    def evaluate(self, batch: Batch, gates: Gates | None = None, fallback: Fallback | None = None) -> Outcome: ...


class Subject(Protocol):
    """A model whose heads can be gated, observed and removed."""

    @property
    def grid(self) -> HeadGrid: ...

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which it computes."""
        ...

    def outputs(self, batch: Batch, gates: Gates | None = None) -> Tensor:
        """All that the model says of a batch, at real positions only, in any shape: what proofs compare."""
        ...

    def evaluate(self, batch: Batch, gates: Gates | None = None, fallback: Fallback | None = None) -> Outcome:
        """Differentiable in the gates."""
        ...

    def evaluate_masks(self, batch: Batch, gates: Tensor, fallback: Fallback | None = None) -> Outcome:
        """Return the outcome under every row of `gates` (M, N): (M, B) each, equal to `evaluate` up to rounding, and
        faster than one row after the other."""
        ...

    def queries(self, batch: Batch) -> dict[Block, Tensor]:
        """(B, T) for each block in the order of `grid`: True at the positions that its heads write to, False on
        padding."""
        ...

    def unread(self) -> Collection[Block]:
        """The blocks that no other part of the model reads, so that closing their heads must change nothing."""
        ...

    def head_outputs(self, batch: Batch) -> dict[Block, Tensor]:
        """The output of every head with all gates open, before gate and W_O: (B, H, T, K) for each block."""
        ...

    def attention_maps(self, batch: Batch) -> dict[Block, AttentionMap]:
        """Return the attention weights with all gates open, block by block in the order of `grid`."""
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

    def copied(self) -> Self:
        """A copy that shares no weights."""
        ...

    def answered(self, data: Batch) -> Batch:
        """The examples with the answers of the model itself in the place of labels that it would read."""
        ...

    def last_maps(self, batches: Sequence[Batch]) -> Iterator[LastMap]:
        """Yields the last map of every sublayer of a pass over the batches, in forward order. What follows is computed
        with the map as the caller leaves it, so that a refit can fit them one after the other."""
        ...

    def predict(self, batch: Batch) -> Any:
        """Do the call that is timed; for our own model greedy decoding, as many steps as the targets are long."""
        ...

    def count_parameters(self) -> int: ...

    def count_flops(self, batch: Batch) -> int:
        """Floating-point operations of one pass: two for each multiply-add of a matrix product."""
        ...


@runtime_checkable
class DecodesGreedily(Protocol):
    """A subject whose quality is exact match under greedy decoding."""

    def evaluate(self, batch: Batch, gates: Gates | None = None, fallback: Fallback | None = None) -> Outcome: ...

    def decodes_right(self, batch: Batch) -> Tensor:
        """(B,): whether greedy decoding, really done, ends in the target."""
        ...


@runtime_checkable
class CarriesRelevance(Protocol):
    """A subject whose layers can pass relevance back instead of gradients."""

    def relevance(self, batch: Batch, epsilon: float) -> Tensor:
        """(B, N): the relevance of every head for the largest logit at each token, summed over the tokens, by
        layer-wise relevance propagation with the ε-rule."""
        ...
