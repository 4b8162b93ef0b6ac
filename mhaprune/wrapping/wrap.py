"""Find and prove the heads of any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.data import Splits
from mhaprune.heads import HeadGrid
from mhaprune.measure.outcomes import Diverged, check_weights_finite
from mhaprune.storage.cache import Cache
from mhaprune.tables import LOSS_UNIT, QUALITY_NAME, TIMED_NAME, UNITS
from mhaprune.wrapping.batches import Batches
from mhaprune.wrapping.blocks import AttentionBlock, Unsupported, name_blocks
from mhaprune.wrapping.discovery import discover
from mhaprune.wrapping.hints import check_attention, unseen
from mhaprune.wrapping.losses import Drift, Judge, name_of, quality_for, unit_of
from mhaprune.wrapping.proofs import Proofs, run_proofs
from mhaprune.wrapping.removal import MORE_COUNTS, with_more_counts
from mhaprune.wrapping.replay import at_rest
from mhaprune.wrapping.torch_nn import converted
from mhaprune.wrapping.wrapped import WrappedModel


@dataclass(frozen=True, repr=False, eq=False)
class ModelWithData:
    """A wrapped model with its examples and the results of the proofs."""

    subject: WrappedModel
    splits: Splits[Batches]
    """The batches of `score` and, where they were given, `choose`, `report` and `train`."""
    quality_name: str
    proven: Proofs
    seed: int
    """The seed of scores that draw random numbers."""
    unseen: tuple[str, ...] = ()
    """The paths of the attention layers in which no head was found."""

    def __repr__(self) -> str:
        blocks, idle = len(self.subject.blocks), [head for head in self.grid if head in self.subject.without_effect]
        parts = [
            f"{len(self.grid)} {self.subject.counted} in {blocks} block{'s' * (blocks != 1)}",
            f"{len(idle)} without effect ({_first(idle)})" if idle else "all with an effect",
            f"none removable: {self.proven.why_not}" if self.proven.why_not else "all removable",
        ]
        if self.subject.prove == "none":
            parts[1:] = ["not proved"]
        return ", ".join(parts) + (f"; not seen: {_first(self.unseen)}" if self.unseen else "")

    @property
    def grid(self) -> HeadGrid:
        """The heads by name, in the order of the flat axis N."""
        return self.subject.grid

    @property
    def words(self) -> dict[str, str]:
        """Names that tables show, by column: the quality, the timed call, the unit of the loss, and what counts as one
        head if that is a set of heads."""
        sets = {UNITS: self.subject.counted} if self.subject.counted != "heads" else {}
        return {
            **sets,
            QUALITY_NAME: self.quality_name,
            TIMED_NAME: "a forward pass",
            LOSS_UNIT: unit_of(self.subject.loss),
        }

    def check_removable(self) -> None:
        """Raise `Unsupported` if the heads can be gated but not removed."""
        if self.proven.why_not:
            raise Unsupported(f"heads of this model can be gated, not removed: {self.proven.why_not}")


def understand(
    model: nn.Module,
    loss: Judge,
    given: Mapping[str, Any],
    quality: Judge | None = None,
    blocks: Sequence[AttentionBlock] | None = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
    seed: int = 0,
    prove: str = "blocks",
    workers: int = 0,
    cache: str | Path | None = None,
) -> ModelWithData:
    """Find and prove the heads of a model, see `mhaprune.wrap`; `given` holds the batches of each split, or None."""
    kept = None if cache is None else Cache(cache)
    check_weights(model)
    splits = {
        name: Batches.of(batches, name) for name, batches in given.items() if batches is not None or name == "score"
    }
    run = call or call_plainly
    quality = quality or quality_for(loss)
    model = converted(model)
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    first = splits["score"][:1].converted(weight.device, weight.dtype)
    if blocks is None:
        try:
            found, overlooked = discover(model, lambda one: run(one, first.arguments()))
        except Exception as error:
            if isinstance(error, Unsupported):
                raise
            _check_call(model, first, run)  # the plain call, whose error says more
            reason = " ".join(str(error).split())[:200]
            raise Unsupported(f"model: its gradients cannot be traced ({type(error).__name__}: {reason})") from error
    else:
        if not blocks:
            raise ValueError("blocks=[]: must name an attention layer, or be left out")
        _check_call(model, first, run)
        found, overlooked = [block.completed(model) for block in blocks], []
        check_attention(model, found, lambda: run(model, first.arguments()))
    names = name_blocks([block.path for block in found])
    subject = WrappedModel(model, tuple(found), tuple(names), loss, quality, run, prove=prove)
    drifts = [judge for judge in (loss, quality) if isinstance(judge, Drift)]
    if len({judge.represent for judge in drifts}) > 1:
        raise ValueError("quality: looks at the output in another way than the loss, both must share one `represent`")
    if len(drifts) == 2 and call is None and (batches := splits["score"]).form is tuple and len(batches.fields) > 1:
        raise ValueError(
            f"score: a batch is a tuple of {len(batches.fields)}, the last of them a target that drift does not read;"
            " if it is an input, give dicts, or call=lambda model, batch: model(*batch); if not, give the inputs alone"
        )
    if drifts:
        splits = {name: with_dense(subject, split, drifts[0]) for name, split in splits.items()}
    proven = run_proofs(subject, splits["score"][:2], prove)
    looks = [[with_more_counts(model, block, words) for block in found] for words in MORE_COUNTS]
    looks += [[replace(block, translated=True, as_written=left) for block in found] for left in (True, False)]
    for look in looks if proven.why_not and not any(block.why_not for block in found) else ():
        looked = subject.changed(blocks=tuple(look))
        again = run_proofs(looked, splits["score"][:2], prove)
        if not again.why_not:
            subject, proven = looked, again
            break
    subject = subject.changed(without_effect=frozenset(proven.without_effect), workers=workers, cache=kept)
    return ModelWithData(
        subject, Splits(**splits), name_of(quality), proven, seed, tuple(unseen(model, found, overlooked))
    )


def call_plainly(model: nn.Module, arguments: Any) -> Any:
    """Call a model with a batch: a dict by names, a tuple without its last part, the target."""
    if isinstance(arguments, Mapping):
        return model(**arguments)
    return model(*(arguments[:-1] or arguments)) if isinstance(arguments, tuple) else model(arguments)


def _check_call(model: nn.Module, first: Batches, run: Callable[[nn.Module, Any], Any]) -> None:
    """Raise ValueError, one line, for a model that cannot be called with a batch."""
    try:
        with torch.no_grad(), at_rest(model):
            run(model, first.arguments())
    except Exception as error:  # of a model that may be anybody's
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"score: the model cannot be called with these batches ({type(error).__name__}: {reason}); dicts are given"
            " by name, tuples without their last part; call= names another way"
        ) from error


def with_dense(subject: WrappedModel, split: Batches, judge: Drift, batch_size: int = 64) -> Batches:
    """Return the split with the dense model's output for each example."""
    said: list[Tensor] = []
    with torch.no_grad():
        for part in split.batches(batch_size):
            batch = part.converted(subject.device, subject.dtype)
            said.append(judge.represent(subject.run_gated(batch), batch.as_given()))
    return split.with_dense(torch.cat(said))


def check_weights(model: nn.Module) -> None:
    """Raise `Unsupported` for weights that cannot be read or cut."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise Unsupported("model: is a DistributedDataParallel, wrap model.module")
    if hasattr(model, "_orig_mod"):
        raise Unsupported("model: is compiled, wrap the model before torch.compile")
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise Unsupported("model: has no weights of real numbers")
    placed = getattr(model, "hf_device_map", None) or {}
    for path, place in placed.items() if len(set(placed.values())) > 1 else ():
        if place in ("cpu", "disk"):
            raise Unsupported(f"model: {path} is offloaded ({place}), its device_map must name devices that compute")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise Unsupported(f"model: its weight {name} is on the meta device, load the weights first")
    try:
        check_weights_finite(model)
    except Diverged as error:
        raise Unsupported(f"model: {error}") from None
    for path, module in model.named_modules():
        kind = type(module)
        if "quantized" in kind.__module__ or kind.__name__ in ("Linear8bitLt", "Linear4bit"):
            raise Unsupported(f"model: {path} is a {kind.__name__} of {kind.__module__}, must have plain weights")


def _first(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
