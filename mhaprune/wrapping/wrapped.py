"""Any model as a `Subject`.

Dimensions: B = batch, T = positions, H = heads of a block, K = head_dim, D = width of the model, N = all heads, M =
masks.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mhaprune.heads import Block, HeadGrid, HeadId, HeadMask
from mhaprune.model.replay import Replay, at_rest, find_maps, walk
from mhaprune.subject import AttentionMap, Fallback, Gates, LastMap
from mhaprune.wrapping.batches import Batches
from mhaprune.wrapping.blocks import AttentionBlock, Rows, grid_of, name_blocks, weight_of
from mhaprune.wrapping.gating import head_by_head, hooked
from mhaprune.wrapping.interception import attention_weights
from mhaprune.wrapping.losses import LossAndQuality, PerExample, flat, judged
from mhaprune.wrapping.removal import remove_heads


@dataclass
class _Last:
    """The number of positions of each block in the last batch."""

    batch: Batches | None = None
    lengths: dict[Block, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class WrappedModel:
    """A model, its blocks of heads, and what judges it: see `subject.py` for what its methods promise.

    Nothing of the model is changed. Gates are hooks for the length of one call, and removal makes a copy.
    """

    model: nn.Module
    blocks: tuple[AttentionBlock, ...]
    names: tuple[Block, ...]
    """What the blocks are called."""
    loss: PerExample
    quality: PerExample
    run: Callable[[nn.Module, Any], Any]
    """Calls the model with a batch in the user's form."""
    without_effect: frozenset[HeadId] = frozenset()
    """The heads whose gates change no output."""
    _last: _Last = field(default_factory=lambda: _Last(), repr=False)

    @cached_property
    def grid(self) -> HeadGrid:
        return grid_of(self.names, self.blocks)

    @property
    def device(self) -> torch.device:
        return self._a_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._a_weight.dtype

    def evaluate(self, batch: Batches, gates: Gates | None = None, fallback: Fallback | None = None) -> LossAndQuality:
        batch = batch.converted(self.device, self.dtype)
        return self.judge(self.run_gated(batch, gates, fallback), batch)

    def judge(self, output: Any, batch: Batches) -> LossAndQuality:
        """Return loss and quality of an output; see `judged`."""
        return judged(output, batch.as_given(), len(batch), self.loss, self.quality)

    def run_gated(
        self,
        batch: Batches,
        gates: Gates | None = None,
        fallback: Fallback | None = None,
        seen: Callable[[AttentionBlock, Tensor], None] | None = None,
    ) -> Any:
        """Call the model with a batch. Raises ValueError for gates that do not fit."""
        by_name = {str(block): piece for block, piece in self._pieces(gates, len(batch)).items()}
        instead = {str(block): piece for block, piece in (fallback or {}).items()}
        with at_rest(self.model), hooked(self.model, self._by_name, len(batch), by_name, instead, seen):
            return self.run(self.model, batch.arguments())

    def outputs(self, batch: Batches, gates: Gates | None = None) -> Tensor:
        """Every real number that the model returns for the batch, at real positions where these can be told."""
        batch = batch.converted(self.device, self.dtype)
        return flat(self.run_gated(batch, gates), batch)

    @torch.no_grad()
    def evaluate_masks(self, batch: Batches, gates: Tensor, fallback: Fallback | None = None) -> LossAndQuality:
        """Run row by row; what no gate of a row has touched yet is taken from an open pass, see `Replay`."""
        batch = batch.converted(self.device, self.dtype)
        replay = Replay(self.model, [block.out for block in self.blocks])
        rows: list[LossAndQuality] = []
        with at_rest(self.model):
            with replay.recording():
                self.run(self.model, batch.arguments())
            for gates_N in gates:
                pieces = zip(self.blocks, gates_N.split(self.grid.sizes), strict=True)
                with replay.until([block.out for block, piece in pieces if bool((piece != 1).any())]):
                    rows.append(self.judge(self.run_gated(batch, gates_N, fallback), batch))
        return LossAndQuality(*(torch.stack(values) for values in zip(*rows, strict=True)))

    def queries(self, batch: Batches) -> dict[Block, Tensor]:
        if self._last.batch is not batch:
            self.head_outputs(batch)
        lengths, batch = self._last.lengths, batch.converted(self.device, self.dtype)
        return {
            name: self._real(batch, block.path, lengths[name])
            for name, block in zip(self.names, self.blocks, strict=True)
        }

    def head_outputs(self, batch: Batches) -> dict[Block, Tensor]:
        contexts: dict[AttentionBlock, Tensor] = {}

        def seen(block: AttentionBlock, x: Tensor) -> None:
            contexts[block] = head_by_head(x, block, len(batch))

        with torch.no_grad():
            self.run_gated(batch.converted(self.device, self.dtype), seen=seen)
        found = {name: contexts[block] for name, block in zip(self.names, self.blocks, strict=True)}
        self._last.batch, self._last.lengths = batch, {name: context.shape[2] for name, context in found.items()}
        return found

    def unread(self) -> Collection[Block]:
        return set(self.names) - {head.block for head in self.grid if head not in self.without_effect}

    def attention_maps(self, batch: Batches) -> dict[Block, AttentionMap]:
        """Raises ValueError for a model that computes attention in a way that shows no weights."""
        batch_here = batch.converted(self.device, self.dtype)
        with torch.no_grad(), attention_weights(self.model, [block.path for block in self.blocks]) as seen:
            self.run_gated(batch_here)
        valid, maps = self.queries(batch), {}
        for name, block in zip(self.names, self.blocks, strict=True):
            if block.path not in seen:
                raise ValueError(f"needs attention weights, which {block.path} does not show; leave it out")
            weights_BHTU = seen[block.path][:, : block.heads]
            queries_BT, length = valid[name], weights_BHTU.shape[-1]
            keys_BU = batch_here.valid(length, of_decoder=False) if block.cross else queries_BT
            maps[name] = AttentionMap(weights_BHTU, queries_BT, keys_BU)
        return maps

    def output_weights(self) -> dict[Block, Tensor]:
        found = {}
        for name, block in zip(self.names, self.blocks, strict=True):
            columns_DW = weight_of(self.model.get_submodule(block.out))[:, block.order.to(self.device)]
            found[name] = columns_DW.T.unflatten(0, (block.heads, self._head_dim(block)))
        return found

    def value_weights(self) -> dict[Block, Tensor]:
        found = {}
        for name, block in zip(self.names, self.blocks, strict=True):
            if not isinstance(block.value, Rows):
                raise ValueError(f"needs the weights of the values, which are not known for {block.path}; leave it out")
            weight = weight_of(self.model.get_submodule(block.value.path))
            rows = [list(block.value.heads[kv]) for kv in block.of_kv]
            found[name] = (
                weight[torch.tensor(rows)] if rows else weight.new_zeros(0, self._head_dim(block), weight.shape[1])
            )
        return found

    def learned_gates(self) -> Tensor | None:
        return None

    @property
    def why_not(self) -> dict[str, str]:
        """The blocks whose heads cannot be removed, with the reason."""
        return {block.path: block.why_not for block in self.blocks if block.why_not}

    def without(self, mask: HeadMask) -> Self:
        gone = [head in mask.removed for head in self.grid]
        kept = [[n for n, at in enumerate(self.grid.positions(name)) if not gone[at]] for name in self.names]
        model, blocks = remove_heads(self.model, self.blocks, kept)
        return self.changed(model=model, blocks=tuple(blocks))

    def train(self) -> None:
        """Switch the model to training mode (dropout on)."""
        self.model.train()

    def eval(self) -> None:
        """Switch the model to evaluation mode (dropout off)."""
        self.model.eval()

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by name, as those of a module."""
        return self.model.state_dict()

    def load_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(weights)

    def to(self, dtype: torch.dtype) -> Self:
        """A copy in another precision."""
        return self.changed(model=copy.deepcopy(self.model).to(dtype))

    def in_double(self) -> Self:
        model: Any = copy.deepcopy(self.model).double()
        # The eager attention of transformers takes its softmax in float32, whatever the model computes in.
        if getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager" and model._supports_sdpa:
            model.set_attn_implementation("sdpa")
        return self.changed(model=model)

    def answered(self, data: Batches) -> Batches:
        """As they are: a pretrained model reads no labels but those that are its inputs."""
        return data.converted(self.device, self.dtype)

    def last_maps(self, batches: Sequence[Batches]) -> Iterator[LastMap]:
        """The output projections of the attention, and the last map of every other sublayer that adds to the residual
        stream."""
        silent = {block.out: block.silent for block in self.blocks}
        runs = [partial(self.run, self.model, batch.arguments()) for batch in batches]
        maps = find_maps(self.model, silent, partial(self.run, self.model, batches[0][:1].arguments()))
        for each, found in walk(self.model, maps, runs):
            # A silent head reads as before, and nobody may listen to it again.
            from_column = silent.get(each.path, 0)
            valid = [
                self._real(batch, each.path, stream[..., 0].numel() // len(batch))
                for batch, (_, stream) in zip(batches, found, strict=True)
            ]
            parts = [
                (
                    inputs.reshape(*real.shape, inputs.shape[-1])[real][:, from_column:],
                    stream.reshape(*real.shape, stream.shape[-1])[real],
                )
                for real, (inputs, stream) in zip(valid, found, strict=True)
            ]
            module: Any = self.model.get_submodule(each.path)
            weight = weight_of(module)[:, from_column:]
            yield LastMap(each.path, each.path not in silent, weight, module.bias, parts)

    def copied(self) -> Self:
        return self.changed(model=copy.deepcopy(self.model))

    def changed(self, **parts: Any) -> Self:
        """A subject with some parts exchanged; what was remembered of the last batch is forgotten."""
        return replace(self, **parts, _last=_Last())

    def predict(self, batch: Batches) -> Any:
        with torch.no_grad(), at_rest(self.model):
            return self.run(self.model, batch.converted(self.device, self.dtype).arguments())

    def count_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def count_flops(self, batch: Batches) -> int:
        """By torch's counter, which sees no fused attention."""
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            self.predict(batch)
        return int(counter.get_total_flops())

    def _real(self, batch: Batches, path: str, length: int) -> Tensor:
        """(B, T): which positions are real. A module at `path` has written to `length` of them."""
        return batch.valid(length, self.two_sided and "decoder" in path)

    @cached_property
    def two_sided(self) -> bool:
        """True if it has an encoder and a decoder, so that some positions are of the one and some of the other."""
        return all(any(part in block.path for block in self.blocks) for part in ("encoder", "decoder"))

    @cached_property
    def _by_name(self) -> dict[str, AttentionBlock]:
        return {str(name): block for name, block in zip(self.names, self.blocks, strict=True)}

    @cached_property
    def _a_weight(self) -> Tensor:
        """The parameter itself, not a view of it: a subject is copied with what it remembers."""
        weight = self.model.get_submodule(self.blocks[0].out).weight
        assert isinstance(weight, Tensor)
        return weight

    def _head_dim(self, block: AttentionBlock) -> int:
        return len(block.columns[0]) if block.columns else 0

    def _pieces(self, gates: Gates | None, batch_size: int) -> Mapping[Block, Tensor]:
        if gates is None:
            return {}
        if not isinstance(gates, Tensor):
            return gates
        if gates.shape not in ((len(self.grid),), (batch_size, len(self.grid))):
            raise ValueError(
                f"gates of shape {tuple(gates.shape)}: must be ({len(self.grid)},), or ({batch_size},"
                f" {len(self.grid)}) for a batch of {batch_size}"
            )
        if gates.device.type != self.device.type:
            raise ValueError(f"gates on {gates.device}: the model is on {self.device}")
        return self.grid.split(gates)


def wrapped(
    model: nn.Module, blocks: Sequence[AttentionBlock], loss: PerExample, quality: PerExample, run: Callable[..., Any]
) -> WrappedModel:
    """The model with its blocks named."""
    return WrappedModel(model, tuple(blocks), tuple(name_blocks([block.path for block in blocks])), loss, quality, run)
