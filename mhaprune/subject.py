"""The protocol through which scorers, schedules, measurements and speed see a model.

Dimensions: B = batch, T = positions, H = heads of a block, K = head_dim, D = model width, N = all heads.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from mhaprune.heads import BlockId, HeadGrid, HeadMask
from mhaprune.moved import names_in

if not TYPE_CHECKING:  # else no name of this module would be checked
    __getattr__ = names_in("mhaprune.lab.tasks.sequences", "AnswerOutcome")


class Outcome(Protocol):
    """The results of a model on the examples of a batch: a NamedTuple of tensors (B,).

    Each kind of model can have its own measure of quality: exact match for our tasks; accuracy, agreement or one minus
    drift for others. Each field becomes a column of a table. No field is a mean over the batch.
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


class AttentionMap(NamedTuple):
    """The attention weights of one block.

    `weights` (B, H, T, U) sum to 1 over the keys U, or to less if a sink takes the rest; `queries` (B, T) and `keys`
    (B, U) are False on padding and on end of sequence.
    """

    weights: Tensor
    queries: Tensor
    keys: Tensor


class LastMap(NamedTuple):
    """The linear map that ends a sublayer, with its inputs. The sublayer adds the output of the map to the residual
    stream."""

    name: str
    """The path of the map."""
    heads: Tensor | None
    """The columns of `weight` that read each head, (H, K), if the map is the W_O of an attention block; None if it ends
    a feed-forward part."""
    weight: Tensor
    """The weight (D, W) of the map. A caller may change it in place."""
    bias: Tensor | None
    """The bias (D,) of the map. A caller may change it in place."""
    parts: Sequence[tuple[Tensor, Tensor]]
    """One pair of tensors per batch, without padding: the inputs of the map, (tokens, W), and the residual stream after
    the sublayer, (tokens, D). W is 0 for a block without heads."""


Gates = Tensor | Mapping[BlockId, Tensor]
"""Gates of all heads, (N,) or (B, N), in the order of the grid; or, by block, a gate for every head and token, (B, H,
T). 1 is open, 0 is closed."""

Batch = Any
"""Some of the examples, in the type of `Data` that the model reads: `Examples` for our own model."""

Fallback = Mapping[BlockId, Tensor]
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
        """The device on which the model computes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type in which the model computes."""
        ...

    @property
    def counted(self) -> str:
        """The name of the units of the grid in messages, in the plural: `heads`."""
        ...

    def outputs(self, batch: Batch, gates: Gates | None = None) -> Tensor:
        """Return all outputs of the model for a batch, without padding, as one tensor of any shape, for proofs."""
        ...

    def evaluate(self, batch: Batch, gates: Gates | None = None, fallback: Fallback | None = None) -> Outcome:
        """Return the outcome of a batch. It is differentiable in the gates."""
        ...

    def evaluate_masks(self, batch: Batch, gates: Tensor, fallback: Fallback | None = None) -> Outcome:
        """Return the outcome under every row of `gates` (M, N). Each field is (M, B), equal to `evaluate` row by row up
        to rounding, but faster."""
        ...

    def queries(self, batch: Batch) -> dict[BlockId, Tensor]:
        """Return for each block, in the order of `grid`, a mask (B, T) of the positions that its heads write to: False
        on padding."""
        ...

    def unread(self) -> Collection[BlockId]:
        """Return the blocks that cannot change the output of the model: closing their heads must change nothing."""
        ...

    def head_outputs(self, batch: Batch) -> dict[BlockId, Tensor]:
        """Return the output of every head with all gates open, before gate and W_O: (B, H, T, K) for each block."""
        ...

    def attention_maps(self, batch: Batch, of: Collection[BlockId] | None = None) -> dict[BlockId, AttentionMap]:
        """Return the attention weights with all gates open, block by block in the order of `grid`; those of the blocks
        `of` alone take less memory."""
        ...

    def output_weights(self) -> dict[BlockId, Tensor]:
        """Return O_n of each block, (H, K, D), in the order of `grid`: the slice of W_O that reads a head."""
        ...

    def value_weights(self) -> dict[BlockId, Tensor]:
        """Return, for each block, the rows of W_V that make the values of each head, (H, K, width of the input of W_V).

        Blocks and heads are in the order of `grid`.
        """
        ...

    def held_weights(self) -> Tensor:
        """Return how many weights a removal of each head takes, (N,). Weights that several heads share count in equal
        parts."""
        ...

    def learned_gates(self) -> Tensor | None:
        """Return the learned gates, (N,); None for a model without any."""
        ...

    def without(self, mask: HeadMask, shared: bool = False) -> Self:
        """Return a copy from which the masked heads are removed. Learned gates are folded into the weights. If
        `shared`, the copy is only to be looked at: weights that are not cut are those of this subject."""
        ...

    def removal_proof(self, batch: Batch) -> Callable[[HeadMask], float]:
        """Return a function that takes a mask and computes, in float64, the `relative_difference` of the outputs of the
        batch with these heads masked and with them removed."""
        ...

    def copied(self) -> Self:
        """Return a copy that shares no weights."""
        ...

    def answered(self, data: Batch) -> Batch:
        """Return the examples. If the model reads labels as inputs, its own answers stand in place of the labels."""
        ...

    def confidence(self, data: Batch, outcome: Outcome) -> Tensor | None:
        """Return the probability that the model gives to its own answer to each example, (E,). `outcome` is what was
        measured on all of them. None if its answers have no probabilities, or are not right or wrong: if the
        quality is not 1 or 0."""
        ...

    def last_maps(self, batches: Sequence[Batch]) -> Iterator[LastMap]:
        """Yield the last linear map of every sublayer, in forward order, while the batches pass through the model. If
        the caller changes a map, the rest of the pass is computed with the change. So a refit can fit one map after the
        other."""
        ...

    def predict(self, batch: Batch) -> Any:
        """Run the model once on a batch: the call that is timed. Our own model decodes greedily, as many tokens as the
        padded targets have columns."""
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
        """Return a mask (B,): True for each example whose target equals the answer of greedy decoding."""
        ...
