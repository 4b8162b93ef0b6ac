"""Any module whose blocks of heads are known, as a `Subject`.

Dimensions: B = batch, T = positions, U = keys, H = heads of a block, K = head_dim, D = width of the model, N = all
heads.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor, nn

from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.heads import BlockId, HeadGrid, HeadMask
from mhaprune.hooks.attention_calls import Window, attention_weights
from mhaprune.hooks.blocks import Block, Unsupported, effective_weight, grid_of, weight_of
from mhaprune.hooks.eval_mode import at_rest
from mhaprune.hooks.gating import head_by_head, hooked
from mhaprune.hooks.pytree import of_equal_sizes, precise
from mhaprune.hooks.replay import Replay, find_maps, recorders, walk
from mhaprune.measure.outcomes import joined, relative_difference
from mhaprune.progress import track
from mhaprune.subject import AttentionMap, Batch, Fallback, Gates, LastMap, Outcome
from mhaprune.surgery.copying import alone, copied, in_double
from mhaprune.surgery.removal import held_weights, remove_heads
from mhaprune.surgery.streaming import stream_heads


class GatedModel(ABC):
    """The base of all subjects: a module and its blocks of heads.

    `subject.py` describes the methods. Because of this class, all other code treats every model in one way. A subclass
    says how the model is called with a batch, how its output is judged and which positions are real. All else follows
    from the blocks: gates are hooks for the length of one call, removal makes a copy, and the module is never changed.
    """

    blocks: tuple[Block, ...]
    names: tuple[BlockId, ...]
    """The name of each block, a site and a layer, in the order of `blocks`."""
    window: Window | None = None
    """What a closed head still sees; None if it outputs zeros."""

    @property
    @abstractmethod
    def module(self) -> nn.Module: ...

    @abstractmethod
    def with_module(self, module: Any, blocks: Sequence[Block]) -> Self:
        """Return a copy of this subject with another module and, for it, another list of blocks."""

    @abstractmethod
    def call(self, batch: Batch) -> Any:
        """Return the output of the module for a batch."""

    @abstractmethod
    def judge(self, output: Any, batch: Batch) -> Outcome: ...

    @abstractmethod
    def real_outputs(self, output: Any, batch: Batch) -> Tensor:
        """Return all real numbers of an output, without padding, in any shape."""

    @abstractmethod
    def real(self, batch: Batch, path: str, length: int) -> Tensor:
        """Return a mask (B, `length`) that is False on padding. Its columns are the positions that the module at `path`
        writes to."""

    @abstractmethod
    def mapped(self, batch: Batch, block: BlockId, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the queries (B, T) and keys (B, U) that an attention map shows. `weights` is None for a block without
        heads."""

    def placed(self, batch: Any) -> Any:
        """Return the batch on the device and in the precision of the model."""
        return batch

    @cached_property
    def grid(self) -> HeadGrid:
        return grid_of(self.names, self.blocks)

    @property
    def counted(self) -> str:
        """The word for the things that the grid counts."""
        kinds = {block.kind for block in self.blocks}
        return "heads" if kinds <= {"head"} else "neurons" if kinds == {"neuron"} else "units"

    @property
    def device(self) -> torch.device:
        return self._a_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._a_weight.dtype

    def evaluate(self, batch: Batch, gates: Gates | None = None, fallback: Fallback | None = None) -> Any:
        batch = self.placed(batch)
        return self.judge(self.run_gated(batch, gates, fallback), batch)

    def run_gated(
        self,
        batch: Batch,
        gates: Gates | None = None,
        fallback: Fallback | None = None,
        seen: Callable[[BlockId, Tensor], None] | None = None,
    ) -> Any:
        """Call the module with a batch from `placed`. Raises ValueError for gates that do not fit, and `Unsupported`,
        which names the layer, if the pass did not apply a gate or did not show a head's output."""
        if self.window is not None and fallback is not None:
            raise ValueError("closed heads see a window, so nothing may replace what they compute; leave it out")
        pieces = self._pieces(gates, len(batch))
        with at_rest(self.module), self.gated(len(batch), pieces, fallback, seen) as calls:
            output = self.call(batch)
        if pieces is not None or seen is not None:
            self.check_calls(calls, pieces if seen is None else None)
        return output

    def check_calls(self, calls: Counter[BlockId], pieces: Mapping[BlockId, Tensor] | None) -> None:
        """Raise `Unsupported` if a pass did not call the output projection of a block as often as it should. An open
        gate need not be applied, so passes that replay their first part are fine."""
        for name, block in self.by_name.items():
            if calls[name] >= (1 if block.call is None else block.calls) or not block.heads:
                continue
            piece = None if pieces is None else pieces.get(name)
            if pieces is None or (piece is not None and (piece.requires_grad or bool((piece != 1).any()))):
                raise Unsupported(
                    f"{block.path}: its heads were not gated, because the pass called {block.out}"
                    f" {calls[name]} times where it should call it {block.calls}; was a layer replaced after wrap,"
                    " or is it left out for some inputs?"
                )

    def gated(
        self,
        batch_size: int,
        gates: Gates | None = None,
        fallback: Fallback | None = None,
        seen: Callable[[BlockId, Tensor], None] | None = None,
    ) -> AbstractContextManager[Counter[BlockId]]:
        """Return a context in which gates apply to every call of the module. For the arguments see `hooked`."""
        pieces = self._pieces(gates, batch_size)
        return hooked(self.module, self.by_name, batch_size, pieces, fallback, seen, self.window)

    @torch.no_grad()
    def evaluate_masks(self, batch: Batch, gates: Tensor, fallback: Fallback | None = None) -> Any:
        """Run mask by mask. Everything before the first gate that is not 1 is replayed from a pass with all gates open,
        see `Replay`."""
        batch = self.placed(batch)
        replay = Replay(self.module, [path for block in self.blocks for path in block.readers])
        rows = []
        with at_rest(self.module):
            begun = perf_counter()
            with recorders(self.module) as record:
                record(replay)
                dense = self.call(batch)
            seconds = perf_counter() - begun
            if not len(gates):
                return joined([self.judge(dense, batch)], lambda values: torch.stack(values)[:0])
            closed_MB = torch.stack([(x != 1).any(1) for x in gates.split(self.grid.sizes, 1)], 1).tolist()
            runs = sum(1 - closed_B.index(True) / len(closed_B) for closed_B in closed_MB if any(closed_B))
            for gates_N, closed_B in track([*zip(gates, closed_MB, strict=True)], "masks", expected=seconds * runs):
                closed = [block for block, gone in zip(self.blocks, closed_B, strict=True) if gone]
                with replay.until([path for block in closed for path in block.readers]):
                    rows.append(self.judge(self.run_gated(batch, gates_N, fallback), batch))
        return joined(rows, torch.stack)

    def outputs(self, batch: Batch, gates: Gates | None = None) -> Tensor:
        batch = self.placed(batch)
        return self.real_outputs(self.run_gated(batch, gates), batch)

    def beside(
        self, smaller: Self, batch: Batch, mask: HeadMask, original: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs with the heads of a mask closed, and those of a model without them, `of_equal_sizes`. No
        part of this model, or of an `original` of both, may run in it."""
        batch = self.placed(batch)
        masked = self.run_gated(batch, mask.gates(self.device))
        with alone(smaller.module, self.module), alone(smaller.module, original or self.module):
            alike = of_equal_sizes(masked, smaller.run_gated(batch))
        return self.real_outputs(alike[0], batch), smaller.real_outputs(alike[1], batch)

    def head_outputs(self, batch: Batch) -> dict[BlockId, Tensor]:
        return {name: torch.cat(parts, dim=2) for name, parts in self.contexts(batch).items()}

    def contexts(self, batch: Batch) -> dict[BlockId, list[Tensor]]:
        """Return the outputs of the heads of each block in each of its calls, (B, H, T, K)."""
        found: dict[BlockId, list[Tensor]] = {name: [] for name in self.names}

        def seen(name: BlockId, x: Tensor) -> None:
            found[name].append(precise(head_by_head(x, self.by_name[name], len(batch)).to(self.device)))

        with torch.no_grad():
            self.run_gated(self.placed(batch), seen=seen)
        return found

    def attention_maps(self, batch: Batch, of: Collection[BlockId] | None = None) -> dict[BlockId, AttentionMap]:
        """Return the attention weights of the blocks `of`, by default of all. Raises ValueError if the model computes
        attention without showing them."""
        asked = {name: block for name, block in self.by_name.items() if of is None or name in of}
        for block in asked.values():
            if not block.attends:
                does = f"show for {block.out} alone" if block.flat else "compute"
                raise ValueError(
                    f"needs attention weights, which {block.path or 'the model'} does not {does}; leave it out"
                )
        batch, maps = self.placed(batch), {}
        lengths: dict[BlockId, list[int]] = {name: [] for name in self.names}

        def measured(name: BlockId, x: Tensor) -> None:
            lengths[name].append(head_by_head(x, self.by_name[name], len(batch)).shape[2])

        with torch.no_grad(), attention_weights(self.module, [block.path for block in asked.values()]) as seen:
            self.run_gated(batch, seen=measured)
        for name, block in asked.items():
            of_calls = seen.get(block.path, [])
            of_calls = of_calls if block.call is None else of_calls[block.call : block.call + 1]
            if len(of_calls) < len(lengths[name]) and block.heads:
                raise ValueError(f"needs attention weights, which {block.path} does not show; leave it out")
            for weights, length in zip(of_calls, lengths[name], strict=False):
                if bool((weights < 0).any()):
                    raise ValueError(
                        f"needs attention weights, those of {block.path or 'the model'} are differences of two"
                        " softmaxes, some below 0; leave it out"
                    )
                if block.heads and weights.shape[:3] != (len(batch), block.heads + bool(block.silent), length):
                    raise ValueError(
                        f"needs attention weights of whole examples, {block.path or 'the model'} computes others;"
                        " leave it out"
                    )
            shown = [self.mapped(batch, name, weights) for weights in of_calls] or [self.mapped(batch, name, None)]
            queries_BT = torch.cat([queries for queries, _ in shown], dim=1)
            keys_BU = shown[0][1]
            if of_calls:
                weights_BHTU = torch.cat([precise(weights.to(self.device)) for weights in of_calls], dim=2)
            else:
                shape = (len(batch), 0, queries_BT.shape[1], keys_BU.shape[1])
                weights_BHTU = torch.zeros(shape, dtype=self.dtype, device=self.device)
            maps[name] = AttentionMap(weights_BHTU[:, : block.heads], queries_BT, keys_BU)
        return maps

    def output_weights(self) -> dict[BlockId, Tensor]:
        found = {}
        for name, block in self.by_name.items():
            if block.also:
                raise ValueError(
                    f"needs one W_O for all positions, {block.path} has {', '.join(block.outs)}; leave it out"
                )
            weight = weight_of(self.module.get_submodule(block.out))
            if block.gate_at:
                with at_rest(self.module):
                    weight = effective_weight(self.module.get_submodule(block.gate_at), weight)
            columns_DW = weight.to(self.device)[:, block.order.to(self.device)]
            found[name] = columns_DW.T.unflatten(0, (block.heads, block.head_dim))
        return found

    def value_weights(self) -> dict[BlockId, Tensor]:
        found = {}
        for name, block in self.by_name.items():
            values = block.source("value")
            if values is None or block.gate_at:
                raise ValueError(f"needs the weights of the values, which are not known for {block.path}; leave it out")
            weight = weight_of(self.module.get_submodule(values.rows.path)).to(self.device)
            rows = [row for part in values.of for row in values.rows.heads[part]]
            found[name] = weight[rows].unflatten(0, (len(values.of), -1 if rows else block.head_dim))
        return found

    def held_weights(self) -> Tensor:
        return torch.cat([held_weights(self.module, block) for block in self.blocks])

    def learned_gates(self) -> Tensor | None:
        """Return the learned gates of each `MultiHeadAttention`, with 1 for heads of other layers; None if no layer has
        gates."""
        layers = [self.module.get_submodule(block.owner) for block in self.blocks]
        gates = [layer.gate() if isinstance(layer, MultiHeadAttention) and layer.gate else None for layer in layers]
        if all(gates_H is None for gates_H in gates):
            return None
        sizes = zip(gates, self.grid.sizes, strict=True)
        return torch.cat([self._a_weight.new_ones(size) if gates_H is None else gates_H for gates_H, size in sizes])

    def without(self, mask: HeadMask, shared: bool = False) -> Self:
        """Return the subject without the masked heads. If `shared`, it is only to be looked at: weights that are not
        cut are those of this subject."""
        gone = [head in mask.removed for head in self.grid]
        kept = [[n for n, at in enumerate(self.grid.positions(name)) if not gone[at]] for name in self.names]
        if self.window is not None:
            return self.with_module(*stream_heads(self.module, self.blocks, kept, self.window, shared))
        return self.with_module(*remove_heads(self.module, self.blocks, kept, shared))

    def in_double(self) -> Self:
        """Return a copy that computes in float64, so that rounding errors are negligible."""
        return self.with_module(in_double(self.module, of=self.module), self.blocks)

    def removal_proof(self, batch: Batch) -> Callable[[HeadMask], float]:
        precise = self.in_double()

        @torch.no_grad()
        def difference(mask: HeadMask) -> float:
            return relative_difference(*precise.beside(precise.without(mask, shared=True), batch, mask, self.module))

        return difference

    def copied(self) -> Self:
        return self.with_module(copied(self.module), self.blocks)

    def last_maps(self, batches: Sequence[Batch]) -> Iterator[LastMap]:
        """Yield the last linear map of every sublayer that adds to the residual stream; for attention that is W_O."""
        blocks = {block.out: block for block in self.blocks}
        maps = find_maps(self.module, blocks, partial(self.call, batches[0][:1]))
        for each, found in walk(self.module, maps, [partial(self.call, batch) for batch in batches]):
            # The columns of a silent head are zero and must stay zero.
            block = blocks.get(each.path)
            from_column = 0 if block is None else block.silent
            last: Any = self.module.get_submodule(each.path)
            weight = weight_of(last)[:, from_column:]
            parts = []
            for batch, (inputs, stream) in zip(batches, found, strict=True):
                inputs, stream = (self.examples_first(x, len(batch)) for x in (inputs, stream))
                real = self.real(batch, each.path, stream.shape[:-1].numel() // len(batch)).to(weight.device)
                inputs, stream = (x.to(weight.device).reshape(*real.shape, x.shape[-1])[real] for x in (inputs, stream))
                parts.append((inputs[:, from_column:], stream))
            heads = None if block is None else (block.order - from_column).view(block.heads, block.head_dim)
            yield LastMap(each.path, heads, weight, last.bias, parts)

    def examples_first(self, x: Tensor, batch_size: int) -> Tensor:
        """Return states (B, T, D) of a model that may compute them as (T, B, D)."""
        dims = {block.batch_dim for block in self.blocks} - {0}
        turned = [dim for dim in dims if dim < x.dim() - 1 and x.shape[dim] == batch_size]
        return x.transpose(0, turned[0]) if turned else x

    def count_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @cached_property
    def by_name(self) -> dict[BlockId, Block]:
        return dict(zip(self.names, self.blocks, strict=True))

    @property
    def _a_weight(self) -> Tensor:
        weight: Any = self.module.get_submodule(self.blocks[0].out).weight if self.blocks else None
        return next(self.module.parameters()) if weight is None else weight

    def _pieces(self, gates: Gates | None, batch_size: int) -> Mapping[BlockId, Tensor] | None:
        if not isinstance(gates, Tensor):
            return gates
        B, N = batch_size, len(self.grid)
        if gates.shape not in ((N,), (B, N)):
            raise ValueError(f"gates of shape {tuple(gates.shape)}: must be ({N},), or ({B}, {N}) for a batch of {B}")
        if gates.device.type != self.device.type:
            raise ValueError(f"gates on {gates.device}: the model is on {self.device}")
        return self.grid.split(gates)
