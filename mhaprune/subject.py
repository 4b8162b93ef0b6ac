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
    """The results of a model on the examples of a batch, (B,) each, as a NamedTuple.

    It exists so that every kind of model has its own measure of quality: exact match for our tasks; accuracy, agreement
    or one minus drift for others. Each field becomes a column of a table. No field is a mean over the batch.
    """

    @property
    def loss(self) -> Tensor:
        """The loss; lower is better. A cross-entropy is in nats."""
        ...

    @property
    def quality(self) -> Tensor:
        """The quality; higher is better, at most 1."""
        ...

    def _asdict(self) -> dict[str, Tensor]: ...

    def __iter__(self) -> Iterator[Tensor]: ...


class AnswerOutcome(NamedTuple):
    """The results of a sequence-to-sequence model on the examples of a batch.

    `loss` is the mean cross-entropy in nats over the target tokens of an example. `token_accuracy` is the share of
    these tokens that the model ranks first, given the true prefix. `quality` is 1 if the model ranks all of them first.
    This is exact match under greedy decoding, which follows the true prefix as long as it makes no mistake.
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
    """The linear map that ends a sublayer, with its inputs. The sublayer adds the output of the map to the residual
    stream."""

    name: str
    """The path of the map."""
    feed_forward: bool
    """Whether it ends a feed-forward part; else it is the W_O of an attention block."""
    weight: Tensor
    """(D, W). It may be written to."""
    bias: Tensor | None
    """(D,). It may be written to."""
    parts: Sequence[tuple[Tensor, Tensor]]
    """For each batch the inputs of the map, (tokens, W), and the residual stream after the sublayer, (tokens, D),
    without padding. W is 0 for a block without heads."""


Gates = Tensor | Mapping[Block, Tensor]
"""Gates (N,) or (B, N) in the order of the grid; or one for every token, (B, H, T), for each block. 1 is open, 0 is
closed."""

Batch = Any
"""Some of the examples, as the `Data` of the model: `Examples` for our own."""

Fallback = Mapping[Block, Tensor]
"""The replacement for the output of closed heads: for each block a tensor that broadcasts to (B, H, T, K)."""


class Evaluated(Protocol):
    """A model that can be measured. Training needs no more."""

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
        """Return all outputs of the model for a batch, without padding, in any shape. Proofs compare them."""
        ...

    def evaluate(self, batch: Batch, gates: Gates | None = None, fallback: Fallback | None = None) -> Outcome:
        """Return the outcome of a batch. It is differentiable in the gates."""
        ...

    def evaluate_masks(self, batch: Batch, gates: Tensor, fallback: Fallback | None = None) -> Outcome:
        """Return the outcome under every row of `gates` (M, N): (M, B) each, equal to `evaluate` up to rounding, and
        faster than one row after the other."""
        ...

    def queries(self, batch: Batch) -> dict[Block, Tensor]:
        """Return for each block, in the order of `grid`, a mask (B, T) of the positions that its heads write to: False
        on padding."""
        ...

    def unread(self) -> Collection[Block]:
        """Return the blocks whose output is not used, so that closing their heads must change nothing."""
        ...

    def head_outputs(self, batch: Batch) -> dict[Block, Tensor]:
        """Return the output of every head with all gates open, before gate and W_O: (B, H, T, K) for each block."""
        ...

    def attention_maps(self, batch: Batch) -> dict[Block, AttentionMap]:
        """Return the attention weights with all gates open, block by block in the order of `grid`."""
        ...

    def output_weights(self) -> dict[Block, Tensor]:
        """Return O_n of each block, (H, K, D), in the order of `grid`: the slice of W_O that reads a head."""
        ...

    def value_weights(self) -> dict[Block, Tensor]:
        """Return for each block the rows of W_V that make each head, (H, K, width of the value's input).

        Blocks and heads are in the order of `grid`.
        """
        ...

    def learned_gates(self) -> Tensor | None:
        """Return the learned gates, (N,); None for a model without any."""
        ...

    def without(self, mask: HeadMask) -> Self:
        """Return a copy from which the masked heads are removed. Learned gates are folded into the weights."""
        ...

    def in_double(self) -> Self:
        """Return a copy that computes in float64, in which rounding is no difference."""
        ...

    def copied(self) -> Self:
        """Return a copy that shares no weights."""
        ...

    def answered(self, data: Batch) -> Batch:
        """Return the examples with the model's own answers in place of the labels, if the model reads labels as
        inputs."""
        ...

    def last_maps(self, batches: Sequence[Batch]) -> Iterator[LastMap]:
        """Yield the last map of every sublayer in a pass over the batches, in forward order. The caller may change a
        map; what follows is computed with the change. So a refit can fit one map after the other."""
        ...

    def predict(self, batch: Batch) -> Any:
        """Make the call that is timed. For our own model it is greedy decoding, with as many steps as the targets are
        long."""
        ...

    def count_parameters(self) -> int: ...

    def count_flops(self, batch: Batch) -> int:
        """Return the floating-point operations of one pass: two for each multiply-add of a matrix product."""
        ...


@runtime_checkable
class DecodesGreedily(Protocol):
    """A subject whose quality is exact match under greedy decoding."""

    def evaluate(self, batch: Batch, gates: Gates | None = None, fallback: Fallback | None = None) -> Outcome: ...

    def decodes_right(self, batch: Batch) -> Tensor:
        """Return whether greedy decoding ends in the target, (B,)."""
        ...


@runtime_checkable
class CarriesRelevance(Protocol):
    """A subject that supports layer-wise relevance propagation."""

    def relevance(self, batch: Batch, epsilon: float) -> Tensor:
        """Return the relevance of every head for the largest logit at each token, summed over tokens, (B, N), by
        layer-wise relevance propagation with the ε-rule."""
        ...
