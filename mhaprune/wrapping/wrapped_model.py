"""A wrapped model: that of a user as a `Subject`, with its loss, padding, cache and runtime.

Dimensions: B = batch, T = positions, N = all heads, M = masks.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mhaprune.heads import BlockId, HeadId, HeadMask
from mhaprune.hooks.attention_calls import Window, attention_weights
from mhaprune.hooks.blocks import Block, Unsupported, grid_of, shared_words
from mhaprune.hooks.eval_mode import at_rest
from mhaprune.losses import Judge, LossAndQuality, accuracy, flat, judged, largest_probability
from mhaprune.measure.outcomes import BATCH_SIZE, by_length, relative_difference
from mhaprune.proofs.block_by_block import BlockProof, largest
from mhaprune.storage.cache import Cache, code_digests, tensor_digest, weights_digest
from mhaprune.storage.functions import Undescribed, described
from mhaprune.storage.store import fingerprint
from mhaprune.subject import AttentionMap, Fallback, Gates, LastMap, Outcome
from mhaprune.subjects.batches import Batches
from mhaprune.subjects.gated_model import GatedModel
from mhaprune.subjects.ray_workers import Shared
from mhaprune.subjects.unit_sets import COUNTED, calls_of, of_all_calls, sets_of, wide, with_all_calls
from mhaprune.surgery.bare_weights import as_written
from mhaprune.wrapping.caches import held_by, parts_of
from mhaprune.wrapping.own_gates import own_factors, with_factors_of
from mhaprune.wrapping.padding import masks_in, masks_of_modules
from mhaprune.wrapping.served import Runtime, served

log = logging.getLogger(__name__)

MANY = 8
"""The number of masks from which a measurement is looked for in the cache, which takes a pass."""


RUNTIME_DIFFERENCE = 1e-3
"""The largest `relative_difference` between the outputs of two runtimes in float32."""
HELD = 12
"""The number of calls of models in another runtime that are remembered: a dense model is asked for again and again."""


@dataclass(frozen=True, eq=False)
class WrappedModel(GatedModel):
    """A user's model with its blocks of heads, and the functions that judge it."""

    model: nn.Module
    blocks: tuple[Block, ...]
    names: tuple[BlockId, ...]
    loss: Judge
    quality: Judge
    run: Callable[[nn.Module, Any], Any]
    """The function that calls the model with a batch in the user's form."""
    without_effect: frozenset[HeadId] = frozenset()
    """The heads whose gates change no output."""
    prove: str = "blocks"
    """The kind of proof of a removal, see `mhaprune.wrap`: "whole" compares whole models, the others compare one
    attention module after the other."""
    workers: int = 0
    """The number of worker processes that many masks are handed to; 0 for this process."""
    cache: Cache | None = None
    """The files in which slow measurements of many masks are kept, so that they go on after a kill; None for none."""
    without_gradient: frozenset[HeadId] = frozenset()
    """The heads whose gates change outputs although the outputs have no derivative in them, as behind a rounding."""
    unit: str = "head"
    """The things that the grid counts, see `grouped`."""
    window: Window | None = None
    """What closed heads still see, see `streaming`."""
    single: Self | None = None
    """The same model with its single heads, if the grid counts sets or calls of them."""
    sample: Batches | None = None
    """An example that the model can be called with."""
    runtime: Runtime = "torch"
    """The way to compute the model where it is timed, and where `in_runtime` is asked for."""
    facts: dict[str, Any] = field(default_factory=dict, repr=False)
    """Facts about the modules of the model and of its smaller copies, by name, once they are known."""
    _known: WeakKeyDictionary[Batches, dict[str, Any]] = field(default_factory=WeakKeyDictionary, repr=False)
    """Facts about batches that were run: `lengths`, the number of positions that each block writes to in each of its
    calls, and `keys`, see `_attended`."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, without what was computed from them, which need not go to another process."""
        computed = ("_known", "facts")
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in computed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _known=WeakKeyDictionary(), facts={})

    @property
    def counted(self) -> str:
        several = self.unit == "block" and any(block.kind == "neuron" for block in self.blocks)
        return "sublayers" if several else COUNTED.get(self.unit, super().counted)

    @property
    def module(self) -> nn.Module:
        return self.model

    def with_module(self, module: Any, blocks: Sequence[Block]) -> Self:
        single = self.single and self.single.with_module(module, self.single.blocks)
        return self.changed(model=module, blocks=tuple(blocks), single=single)

    def changed(self, **parts: Any) -> Self:
        """Return a copy of this subject with some fields replaced."""
        return replace(self, **parts, _known=WeakKeyDictionary())

    def streaming(self, window: Window) -> Self:
        """Return the subject whose closed heads see only a window of the tokens, and whose removed heads stream. Raises
        `Unsupported` for a model in which heads do already."""
        for path, module in self.model.named_modules():
            if getattr(module, "streams", None):
                raise Unsupported(f"{path}: has heads that stream already, choose all of them at once")
        return self.changed(window=window, single=self.single and self.single.streaming(window))

    def grouped(self, unit: str) -> Self:
        """Return the subject with one head per unit.

        A "group" is the heads that share keys and values. If all heads of every block do, each head is a group of its
        own. A "block" is an attention layer. A "call" is one head in one call of a layer that a pass calls several
        times, named as in `layer.3.0@2`. Raises `Unsupported` for groups of different sizes in one block.
        """
        single = self.single or self
        all_shared = all(len(set(block.of_kv)) <= 1 for block in single.blocks)
        once = all(block.calls == 1 for block in single.blocks)
        alone = unit == "head" or (unit == "group" and all_shared) or (unit == "call" and once)
        return single if alone else single._grouped(unit)

    def _grouped(self, unit: str) -> Self:
        if unit == "call":
            names, blocks = zip(*calls_of(self.by_name), strict=True)
            grid = grid_of(names, blocks)
            idle, flat = (
                frozenset(head for head in grid if of_all_calls(head) in heads)
                for heads in (self.without_effect, self.without_gradient)
            )
            parts: dict[str, Any] = {"names": names, "blocks": blocks, "without_effect": idle, "without_gradient": flat}
        else:
            sets = {name: sets_of(block, unit) for name, block in self.by_name.items()}
            named = {name: self.heads_of(name) for name in sets}
            idle = frozenset(
                named[name][members[0]]
                for name in sets
                for members in sets[name]
                if all(named[name][h] in self.without_effect for h in members)
            )
            blocks = tuple(wide(block, sets[name]) for name, block in self.by_name.items())
            parts = {"blocks": blocks, "without_effect": idle, "without_gradient": frozenset()}
        return self.changed(**parts, unit=unit, single=self)

    def heads_of(self, name: BlockId) -> list[HeadId]:
        """Return the heads of a block."""
        return [self.grid.heads[n] for n in self.grid.positions(name)]

    def mask_of_heads(self, mask: HeadMask) -> HeadMask:
        """Return a mask of units as a mask of the single heads. Raises `Unsupported` for heads that lose only some of
        their calls."""
        if self.single is None:
            return mask
        if self.unit == "call":
            return with_all_calls(mask, self.single.grid)
        removed = set()
        for name, block in self.single.by_name.items():
            heads = self.single.heads_of(name)
            for unit, members in zip(self.heads_of(name), sets_of(block, self.unit), strict=True):
                removed |= {heads[h] for h in members} if unit in mask.removed else set()
        return HeadMask(self.single.grid, frozenset(removed))

    def without(self, mask: HeadMask, shared: bool = False) -> Self:
        """Return the subject without the masked units. A removal is made head by head."""
        if self.single is None:
            smaller = super().without(mask, shared)
            return smaller if self.sample is None else with_factors_of(smaller, self, self.run, self.sample, self.facts)
        single = self.single.changed(run=self.run, runtime=self.runtime)  # which `changed` may have replaced
        return single.without(self.mask_of_heads(mask), shared)._grouped(self.unit)

    def learned_gates(self) -> Tensor | None:
        """Return the learned gates, also those of the model's own layers, with 1 for heads of layers without any; None
        if no layer has gates."""
        learned = super().learned_gates()
        own = any(block.gated_by_layer for block in self.blocks)
        if self.single is not None or self.sample is None or not own:
            return learned
        factors = own_factors(self, self.run, self.sample)
        if learned is None:
            learned = torch.ones(len(self.grid), dtype=self.dtype, device=self.device)
        parts = zip(self.blocks, learned.split(self.grid.sizes), strict=True)
        return torch.cat(
            [factors[block.out].to(part) if block.gated_by_layer and block.heads else part for block, part in parts]
        )

    def attention_maps(self, batch: Batches, of: Collection[BlockId] | None = None) -> dict[BlockId, AttentionMap]:
        if self.unit in ("group", "block"):
            raise ValueError(f"needs the attention weights of single heads, not of a {self.unit}; leave it out")
        return super().attention_maps(batch, of)

    def placed(self, batch: Batches) -> Batches:
        return batch.converted(self.device, self.dtype)

    def call(self, batch: Batches) -> Any:
        with suppress(torch.OutOfMemoryError):
            return self.run(self.model, batch.arguments())
        fewer = len(batch) // 2
        while fewer and (runs := self._runs(batch[:fewer])) is False:
            fewer //= 2
        which = "not even one would" if not fewer else f"{fewer} would; give smaller batches"
        raise ValueError(
            f"a batch of {len(batch)} examples of these does not fit into the memory of {self.device}, "
            + (which if not fewer or runs else "give smaller batches")
        )

    def _runs(self, batch: Batches) -> bool | None:
        """Return whether a batch fits into memory; None if that cannot be told, because hooks wait for another."""
        try:
            self.run(self.model, batch.arguments())
        except torch.OutOfMemoryError:
            return False
        except Exception:  # of a model that may be anybody's
            return None
        return True

    def judge(self, output: Any, batch: Batches) -> LossAndQuality:
        """Return loss and quality of an output; see `judged`."""
        return judged(output, batch.as_given(), len(batch), self.loss, self.quality)

    def evaluate(self, batch: Batches, gates: Gates | None = None, fallback: Fallback | None = None) -> Any:
        tensors = gates.values() if isinstance(gates, Mapping) else [] if gates is None else [gates]
        if self.without_gradient and any(gate.requires_grad for gate in tensors):
            names = ", ".join(map(str, sorted(self.without_gradient)[:8]))
            raise ValueError(
                f"needs derivatives, and closing {names} changes outputs without a derivative in the gate; leave it out"
            )
        return super().evaluate(batch, gates, fallback)

    def real_outputs(self, output: Any, batch: Batches) -> Tensor:
        return flat(output, batch)

    def real(self, batch: Batches, path: str, length: int) -> Tensor:
        """See `GatedModel.real`. The mask of a module is found by `masks_of_modules`. What this cannot tell, as the
        frames of a sound, is decided by what the heads of the nearest block do not attend to."""
        mask = self._mask_of(batch, path)
        if mask and batch.fields[mask].shape[1] == length:
            return batch.fields[mask] != 0
        if self.two_sided and "decoder" in (path or "decoder"):
            return batch.of_decoder(length)
        return batch.all_real(length) if mask == "" else self._not_ignored(batch, path, length)

    def real_keys(self, batch: Batches, block: Block, length: int) -> Tensor:
        """Return a mask (B, `length`) that is False where a block reads keys of padding."""
        if not block.cross or (keys := block.source("key")) is None:
            return self._not_ignored(batch, "", length) if block.cross else self.real(batch, block.out, length)
        mask = self._mask_of(batch, keys.rows.path)
        if mask and batch.fields[mask].shape[1] == length:
            return batch.fields[mask] != 0
        return batch.all_real(length) if mask == "" else self._not_ignored(batch, "", length)

    def _mask_of(self, batch: Batches, path: str) -> str | None:
        """Return the mask of the rows of the module at a path, or of the nearest known one; "" for none, None if that
        is not known."""
        if not (masks := masks_in(batch)):
            return None
        known: dict[str, str | None] = self.facts.setdefault(f"rows of {masks}", {})
        if not known:
            known |= masks_of_modules(self, batch)
        keys = {keys.rows.path for block in self.blocks if block.cross and (keys := block.source("key"))}
        near = [path] if path in known else [each for each in known if each and each not in keys]
        nearest = max(near, key=lambda each: shared_words(each, path), default="")
        mask = known.get(nearest)
        return mask if not mask or mask in masks else ("" if mask in batch.fields else None)

    def _not_ignored(self, batch: Batches, path: str, length: int) -> Tensor:
        """Return a mask (B, `length`) of the positions that some head attends to, or that of the batch if it fits."""
        if (mask := batch.mask) is None:
            return batch.all_real(length)
        if mask.shape[1] == length:
            return mask
        attended = self._attended(batch)
        seen = [
            block
            for block in self.blocks
            if block.attends and not block.cross and length in attended.get(block.path, {})
        ]
        if not seen:
            raise ValueError(
                f"needs to know which of {length} positions are padding, {path or 'the model'} does not show it;"
                " leave it out"
            )
        nearest = max(seen, key=lambda block: shared_words(block.path, path))
        return attended[nearest.path][length]

    def last_maps(self, batches: Sequence[Batches]) -> Iterator[LastMap]:
        for batch in batches:  # while no pass is recorded
            self._mask_of(batch, "")
        yield from super().last_maps(batches)

    def _attended(self, batch: Batches) -> dict[str, dict[int, Tensor]]:
        """Return for each block a mask (B, U) of the keys that some query attends to, by their number U."""
        known = self._known.setdefault(batch, {})
        if "keys" not in known:
            with torch.no_grad(), attention_weights(self.module, [block.path for block in self.blocks]) as seen:
                self.run_gated(batch)
            known["keys"] = {
                path: {each.shape[-1]: (each != 0).any(dim=2).any(dim=1) for each in calls if len(each) == len(batch)}
                for path, calls in seen.items()
            }
        keys: dict[str, dict[int, Tensor]] = known["keys"]
        return keys

    def mapped(self, batch: Batches, block: BlockId, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        assert weights is not None, "a layer of another model shows its weights also without heads"
        layer, (T, U) = self.by_name[block], weights.shape[-2:]
        return self.real(batch, layer.out, T), self.real_keys(batch, layer, U)

    @torch.no_grad()
    def evaluate_masks(self, batch: Batches, gates: Tensor, fallback: Fallback | None = None) -> LossAndQuality:
        """Run mask by mask, with workers some masks in each, or take what is in the cache."""
        if self.cache is None or len(gates) < MANY or self.identity is None:
            return self._evaluate(batch, gates, fallback)
        # What the model answers with the last mask stands for its code, its loss and its quality.
        judged, placed = self.evaluate(batch, gates[-1], fallback), self.placed(batch)
        said = fallback or {}
        given = [*placed.tensors().values(), gates, *judged, *said.values()]
        rest = fingerprint(described([placed.whole.constants, [x for x in placed.fields.values() if type(x) is list]]))
        digests = [[list(x.shape), tensor_digest(x)] for x in given]
        what = {"said": list(map(str, said)), "given": digests, "rest": rest}

        def make() -> dict[str, Any]:
            return self._evaluate(batch, gates, fallback)._asdict()

        return LossAndQuality(**self.cache.get_slow("masks", self.identity | what, make))

    def _evaluate(self, batch: Batches, gates: Tensor, fallback: Fallback | None) -> Any:
        if self.workers:
            return self._shared.evaluate_masks(batch, gates, fallback)
        return super().evaluate_masks(batch, gates, fallback)

    @cached_property
    def identity(self) -> dict[str, Any] | None:
        """The facts beside the examples that decide the bits of a measurement; None, with a warning, if a function of
        the user holds something that cannot be read."""
        try:
            judged_by = [described(each) for each in (self.loss, self.quality, self.run)]
        except Undescribed as error:
            log.warning("cache: keeps nothing, because loss=, quality= or call= holds %s", error)
            return None
        return {
            "weights": weights_digest(self.model),
            "judged_by": fingerprint(judged_by),
            "heads": fingerprint([[block.out, block.columns] for block in self.blocks]),
            "window": self.window,
            "code": code_digests(__name__),
            "torch": [str(torch.__version__), str(torch.get_default_dtype())],
            "num_threads": torch.get_num_threads(),
            "device": self.device.type,
        }

    def queries(self, batch: Batches) -> dict[BlockId, Tensor]:
        if "lengths" not in self._known.get(batch, {}):
            self.contexts(batch)
        placed = self.placed(batch)
        return {
            name: torch.cat([self.real(placed, self.by_name[name].out, length) for length in lengths], dim=1)
            for name, lengths in self._known[batch]["lengths"].items()
        }

    def contexts(self, batch: Batches) -> dict[BlockId, list[Tensor]]:
        found = super().contexts(batch)
        lengths = {name: [context.shape[2] for context in parts] for name, parts in found.items()}
        self._known.setdefault(batch, {})["lengths"] = lengths
        return found

    @cached_property
    def _shared(self) -> Shared:
        return Shared(self.changed(workers=0, cache=None), self.workers)

    def unread(self) -> Collection[BlockId]:
        return set(self.names) - {head.block for head in self.grid if head not in self.without_effect}

    def removal_proof(self, batch: Batches) -> Callable[[HeadMask], float]:
        if self.prove != "whole":
            return BlockProof(self, batch).recorded()
        prove = super().removal_proof
        of_parts = [prove(part) for part in batch.batches(len(batch))]
        return lambda mask: largest([difference(mask) for difference in of_parts])

    def answered(self, data: Batches) -> Batches:
        """Return the examples as they are: a pretrained model reads no labels except those among its inputs."""
        return self.placed(data)

    def confidence(self, data: Batches, outcome: Outcome) -> Tensor | None:
        if self.quality is not accuracy:
            return None
        order, batches = by_length(data, BATCH_SIZE)
        return torch.cat([largest_probability(self.predict(batch)) for batch, _ in batches])[order.argsort()]

    def predict(self, batch: Batches) -> Any:
        if self.runtime != "torch":
            return self._served.run(self._served.model, self.placed(batch).arguments())
        with torch.no_grad(), at_rest(self._as_written.model):
            return self._as_written.call(self.placed(batch))

    @cached_property
    def _as_written(self) -> Self:
        """The subject without what only hooks need, which takes time."""
        written = as_written(self.model)
        return self if written is self.model else self.changed(model=written)

    def in_runtime(self) -> Self:
        """Return the subject as its runtime computes it, without gates."""
        if self.runtime == "torch":
            return self
        sample = self.placed(self.sample) if self.sample is not None else None
        if sample is None or self.window is not None:
            raise Unsupported(f"runtime={self.runtime}: heads that stream cannot be exported")
        model = served(self.model, lambda model: self.run(model, sample.arguments()), self.runtime)
        return self.changed(model=model, runtime="torch")

    @cached_property
    def _served(self) -> Self:
        """The subject as its runtime computes it. Times do not depend on weights, so models of one shape share it."""
        known, held = self.facts.setdefault("served", (WeakValueDictionary(), deque(maxlen=HELD)))
        shape = (self.runtime, *(tuple(x.shape) for x in self.model.parameters()))
        if (found := known.get(shape)) is None:
            found = known[shape] = self.in_runtime()
        held.append(found)
        return found

    def count_flops(self, batch: Batches) -> int:
        """Count with torch's counter. Fused attention is switched off, because the counter does not see it."""
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            self.predict(batch)
        return int(counter.get_total_flops())

    def cache_bytes(self, batch_size: int, length: int) -> int:
        """Return the bytes of keys and values that generation keeps for this number of positions. Cross-attention is
        counted as if the source had as many. 0 for a model that cannot generate."""
        if self.single is not None:
            return self.single.cache_bytes(batch_size, length)
        return int(batch_size * sum(self.cached_in(block, length) for block in self.blocks))

    def cached_in(self, block: Block, length: int) -> float:
        """Return the bytes of keys and values of a block for one example of this number of positions."""
        if "held" not in self.facts:
            self.facts["held"] = (
                held_by(self.model, self.blocks, self.sample.arguments(), self.run) if self.sample else {}
            )
        if (held := self.facts["held"].get(block.path)) is None or block.kind != "head":
            return 0.0
        sink, recent, *few = getattr(self.model.get_submodule(block.path), "streams", None) or (0, 0)
        in_window = len(few) * min(length, sink + recent)
        return float(held.bytes_of_part * ((parts_of(block) - len(few)) * held.positions(length) + in_window))

    def uncached(self, length: int) -> set[BlockId]:
        """Return the blocks that keep nothing in the cache."""
        blocks = (self.single or self).by_name.items()
        return {name for name, block in blocks if not (self.single or self).cached_in(block, length)}

    def largest_in_cache(self, length: int) -> float:
        """Return the bytes of keys and values of the largest unit, for one example of this number of positions."""
        single = self.single or self
        whole = [(single.cached_in(block, length), len(self.heads_of(name))) for name, block in single.by_name.items()]
        return max(size / count for size, count in whole if count)

    @cached_property
    def two_sided(self) -> bool:
        """True if the model has an encoder and a decoder, each with positions of its own."""
        return all(any(part in block.path for block in self.blocks) for part in ("encoder", "decoder"))


@torch.no_grad()
def check_runtime(subject: WrappedModel, batches: Batches) -> None:
    """Raise `Unsupported` if onnxruntime, in float32, computes other outputs than torch. A decision that a model makes
    when it is exported, such as whether there is padding, holds for all batches."""
    served_in = subject.changed(runtime="onnxruntime")._served
    for batch in map(subject.placed, batches.batches(len(batches))):
        difference = relative_difference(subject.outputs(batch), served_in.outputs(batch))
        if not difference <= RUNTIME_DIFFERENCE:
            raise Unsupported(
                f"runtime=onnxruntime: outputs differ by {difference:.3g} from those of torch, allowed is"
                f" {RUNTIME_DIFFERENCE:g}"
            )
