"""Find and prove the heads of any model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mhaprune.data import Splits
from mhaprune.discovery.attention import as_flat, discover
from mhaprune.discovery.hints import check_attention, unseen
from mhaprune.discovery.neurons import find_neurons, name_neurons
from mhaprune.heads import BlockId, HeadGrid, HeadMask
from mhaprune.hooks.blocks import AttentionBlock, Block, Unsupported, name_blocks
from mhaprune.hooks.eval_mode import ModelCall
from mhaprune.hooks.pytree import mapped, precise
from mhaprune.losses import Drift, Judge, check_counted, check_fits, name_of, quality_for, unit_of
from mhaprune.measure.outcomes import weight_sums
from mhaprune.proofs.block_by_block import BlockProof
from mhaprune.proofs.closing import closed_whole
from mhaprune.proofs.whole_model import NotByExample, Proofs, check_fullest, prove_gates, prove_removal
from mhaprune.storage.cache import Cache
from mhaprune.subjects.batches import Batches
from mhaprune.surgery.bare_weights import with_linear_parameters
from mhaprune.surgery.counts import MORE_COUNTS, with_more_counts
from mhaprune.surgery.handed_weights import with_called_maps
from mhaprune.surgery.streaming import for_streaming
from mhaprune.surgery.torch_attention import converted
from mhaprune.tables import LOSS_UNIT, QUALITY_NAME, TIMED_NAME, UNITS
from mhaprune.wrapping.checks import check_buffers, check_call, check_conversion, check_weights
from mhaprune.wrapping.own_gates import with_constant_gates
from mhaprune.wrapping.wrapped_model import WrappedModel

KEPT = 2**26
"""The most bytes of recorded inputs that are kept for the proofs of later removals; more are recorded again."""


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
    weights: tuple[int, ...] = ()
    """The weights that were proved, as `weight_sums`."""
    given: tuple[nn.Module, tuple[int, ...]] | None = None
    """The user's model, if another one was proved, and its weights."""
    proof: BlockProof | None = None
    """The proof of a removal with its recorded inputs, if these are small."""

    def __repr__(self) -> str:
        blocks, subject, stuck = len(self.subject.blocks), self.subject, self.proven.stuck
        idle = [head for head in self.grid if head in subject.without_effect]
        free = sum(head.block not in stuck for head in self.grid)
        parts = [
            f"{len(self.grid)} {subject.counted} in {blocks} block{'s' * (blocks != 1)}",
            f"{len(idle)} without effect ({_first(idle)})" if idle else "all with an effect",
            "all removable" if free == len(self.grid) else f"{free} removable",
        ]
        if subject.without_gradient:
            parts[1] += f", {_first(sorted(subject.without_gradient))} without a derivative, so gradient scores fail"
        if free == 0 and stuck:
            parts[2] = f"none removable: {self.proven.why_not}"
        elif stuck:
            parts[2] += f" ({_first([f'{block} is not: {reason}' for block, reason in stuck.items()])})"
        if self.proven.beside:
            parts.append("the loss of an example depends on the others of its batch")
        if subject.prove == "none":
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
        elsewhere = self.subject.runtime != "torch"
        return {
            **sets,
            QUALITY_NAME: self.quality_name + " in torch" * elsewhere,
            TIMED_NAME: "a forward pass" + f" in {self.subject.runtime}" * elsewhere,
            LOSS_UNIT: unit_of(self.subject.loss),
        }

    def check_unchanged(self) -> None:
        """Raise ValueError if the weights are no longer those that were proved."""
        watched = [(self.subject.model, self.weights), *([] if self.given is None else [self.given])]
        if any(weights and weight_sums(model) != weights for model, weights in watched):
            raise ValueError(
                "model: its weights have changed since wrap, so that scores and proofs are not of this model; wrap it"
                " again"
            )

    def check_removable(self, mask: HeadMask | None = None) -> None:
        """Raise `Unsupported` if the heads of a mask can be gated but not removed; without a mask, if none of the
        model's heads can be removed."""
        why_not = self.proven.why_not
        if mask is not None:
            touched = dict.fromkeys(head.block for head in mask.removed)
            why_not = next((self.proven.stuck[block] for block in touched if block in self.proven.stuck), "")
        if why_not:
            raise Unsupported(f"heads of this model can be gated, not removed: {why_not}")


def understand(
    model: nn.Module,
    loss: Judge,
    given: Mapping[str, Any],
    *,
    quality: Judge | None = None,
    blocks: Sequence[AttentionBlock | Block] | None = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
    seed: int = 0,
    prove: str = "blocks",
    workers: int = 0,
    cache: str | Path | None = None,
    units: Collection[str] = ("head",),
) -> ModelWithData:
    """Find and prove the heads of a model, see `mhaprune.wrap`; `given` holds the batches of each split, or None."""
    if cache is not None and not str(cache):
        raise ValueError("cache='': must name a folder; leave it out to keep nothing")
    kept = None if cache is None else Cache(cache)
    check_weights(model)
    splits = {
        name: Batches.of(batches, name) for name, batches in given.items() if batches is not None or name == "score"
    }
    run, quality = call or call_plainly, quality or quality_for(loss)
    whole, model = model, converted(model)
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    tried = Batches.extremes([*splits.values()])
    batch = next(tried.batches(len(tried))).converted(weight.device, weight.dtype)
    call_of_batch = ModelCall(model, batch, run)
    with suppress(Exception), call_of_batch.at_rest():  # what a first call makes, such as tables, is no part of a trace
        call_of_batch.first()
    check_buffers(call_of_batch)
    model, (found, names, not_seen, alone) = _with_blocks(call_of_batch, blocks, units)
    for name, split in splits.items():
        check_counted(loss, split, name)
        check_fits(model, {"loss": loss, "quality": quality}, split)
    subject = WrappedModel(model, tuple(found), tuple(names), loss, quality, run, prove=prove, sample=batch[:1])
    samples = [each[n : n + 1] for each in splits.values() for n in (0, len(each) - 1)]
    subject = with_constant_gates(subject, run, [batch[:1], *samples])
    subject, shared, last = closed_whole(subject, batch[-1:])
    if {block.out for block in subject.blocks} <= {*shared}:
        raise Unsupported(no_neurons(model, units))
    not_seen += shared
    if judge := _drift_of(loss, quality, splits["score"], call):
        splits = {name: with_dense(subject, split, judge) for name, split in splits.items()}
        tried = Batches.extremes([*splits.values()])
    try:
        proved, proof, proven = prove_gates(subject, tried, (alone, last), prove)
    except NotByExample as error:  # experts, that are sent some of the tokens
        not_seen += tuple(error.args[0])
        left = [(name, block) for name, block in subject.by_name.items() if block.out not in not_seen]
        if not left:
            raise Unsupported(no_neurons(model, units)) from None
        names, found = (list(each) for each in zip(*left, strict=True))
        subject = subject.changed(names=tuple(names), blocks=tuple(found))
        proved, proof, proven = prove_gates(subject, tried, (alone, last), prove)
    if proof is not None:
        check_fullest(proved, Batches.fullest([*splits.values()]), tried, proof.dtype)
    if whole is not model and proof is not None:
        check_conversion(whole, subject, proof.batches[0], proof.dtype)
    subject, proven = with_removal(proved, proof, proven)
    facts = {"without_effect": proven.without_effect, "without_gradient": proven.without_gradient}
    sets = {name: frozenset(heads) for name, heads in facts.items()}
    subject = subject.changed(**sets, workers=workers, cache=kept)
    data = Splits(**splits, proof=tried)
    weights = weight_sums(model)  # with buffers that the first call has filled
    kept_proof = small(proof) if prove == "blocks" else None
    of_user = None if whole is model else (whole, weight_sums(whole))
    return ModelWithData(subject, data, name_of(quality), proven, seed, not_seen, weights, of_user, kept_proof)


def small(proof: BlockProof | None) -> BlockProof | None:
    """Return a proof if what it has recorded is small; else None."""
    return proof if proof is not None and proof.recorded_bytes() <= KEPT else None


Found = TypeVar("Found", bound=ModelWithData)


def proved_again(found: Found, subject: WrappedModel) -> Found:
    """Return a wrapped model with another subject, whose removals were proved."""
    proof = BlockProof(subject, found.splits.proof).recorded()
    subject, proven = with_removal(subject, proof, found.proven)
    return replace(found, subject=subject, proven=proven, proof=small(proof))


def with_window(found: Found, sink: int, recent: int) -> Found:
    """Return a wrapped model whose closed heads see only a window, see `Heads.streaming`."""
    if any(block.kind != "head" for block in found.subject.blocks):
        raise Unsupported("units: neurons cannot stream, wrap with heads alone")
    if flat := [block.path or "model" for block in found.subject.blocks if block.flat]:
        raise Unsupported(f"{flat[0]}: computes the heads of several blocks, which cannot stream")
    subject = found.subject.streaming((sink, recent))
    subject = subject.with_module(subject.model, [for_streaming(subject.model, block) for block in subject.blocks])
    found = proved_again(found, subject.changed(prove=subject.prove.replace("none", "blocks")))
    if why_not := found.proven.why_not:
        raise Unsupported(f"heads of this model cannot stream: {why_not}")
    return found


Blocks = tuple[list[Block], list[BlockId], tuple[str, ...], Any]
"""The blocks of a model, see `_blocks`."""


CHANGES = (with_called_maps, with_linear_parameters)
"""What makes a copy of a model in which maps are linear modules that are called. Each is given what the one before it
has made."""


def _with_blocks(
    call: ModelCall, given: Sequence[AttentionBlock | Block] | None, units: Collection[str]
) -> tuple[nn.Module, Blocks]:
    """Return a model with its blocks, found or given. If something was left out, or blocks are given, the model may be
    a copy, in which maps are called whose weights are handed to functions, or are parameters."""
    found, model, failed = None, call.model, None
    try:
        found = _blocks(call, given, units)
    except Unsupported as error:
        failed = error
    changed = call
    for change in CHANGES:
        if found is not None and given is None and not found[2] and not any(block.why_not for block in found[0]):
            break
        with suppress(Exception):  # of a model that may be anybody's
            before, changed = changed, changed.of(change(changed.first))
            if changed.model is not before.model:
                try:
                    found, model = _blocks(changed, given, units), changed.model
                except Unsupported as error:
                    failed = error
    if found is None:
        assert failed is not None
        raise failed
    return model, found


def _blocks(call: ModelCall, given: Sequence[AttentionBlock | Block] | None, units: Collection[str]) -> Blocks:
    """Return the blocks of a model with their names, the paths of attention in no block, and what the model returned
    for the first example of a batch alone."""
    if not units:
        raise ValueError("units=[]: must name head, neuron or both")
    try:
        attention, overlooked, alone = _attention(call, given)
    except Unsupported:
        if "head" in units:
            raise
        with call.at_rest():  # neurons need no attention
            attention, overlooked, alone = [], [], call.first()
    names = name_blocks([block.noted for block in attention])
    not_seen = tuple(unseen(call.model, attention, overlooked))
    if "neuron" not in units:
        return attention, names, not_seen, alone
    neurons, experts = find_neurons(call.first, attention)
    not_seen += experts
    if not neurons and not (experts and "head" in units):
        raise Unsupported(no_neurons(call.model, units))
    found = [*(attention if "head" in units else []), *neurons]
    return found, [*names[: len(found) - len(neurons)], *name_neurons(neurons)], not_seen, alone


def no_neurons(model: nn.Module, units: Collection[str]) -> str:
    """Return the message for a model in which no neurons were found."""
    convolved = {id(part.weight) for part in model.modules() if isinstance(part, nn.Conv1d)}
    named = (name for name, weight in model.named_parameters() if weight.dim() == 3 and id(weight) not in convolved)
    packed = next(named, None)
    return (
        f"units={list(units)}: {type(model).__name__} has no neurons: no linear map has inputs that other"
        " linear maps make one by one, at every position"
        + (f", and {packed} is a tensor of several experts, which cannot be cut" if packed else "")
    )


def _attention(call: ModelCall, given: Sequence[AttentionBlock | Block] | None) -> tuple[list[Block], list[str], Any]:
    """Return the blocks of attention, see `_blocks`."""
    outputs: list[Any] = []
    example = replace(call.first, run=lambda *given: outputs.append(mapped(call.run(*given), Tensor.detach)))

    if given is None:
        try:
            found, overlooked = discover(example)
            return found, overlooked, outputs[0]  # a later one may be of other numbers
        except Exception as error:
            if isinstance(error, Unsupported):
                raise
            check_call(call)  # the plain call, whose error says more
            reason = " ".join(str(error).split())[:200]
            raise Unsupported(f"model: its gradients cannot be traced ({type(error).__name__}: {reason})") from error
    if not given:
        raise ValueError("blocks=[]: must name an attention layer, or be left out")
    check_call(call)
    found = [block if isinstance(block, Block) else block.completed(call.model) for block in given]
    if twice := [block.path for n, block in enumerate(found) if block.out in {other.out for other in found[:n]}]:
        raise ValueError(f"blocks: names {twice[0]} twice, must name each layer once")
    check_attention(example, [block for block in found if block.attends])
    seen: dict[str, int] = {}
    with suppress(Exception):  # of a model in which nothing is found, which is why blocks are given
        seen = {block.out: block.heads for block in discover(example)[0]}
    for block in found:
        if block.attends and (shown := seen.get(block.out, block.heads)) != block.heads:
            raise Unsupported(
                f"blocks: {block.path} with heads={block.heads}: its attention weights are of {shown} heads"
            )
    times = Counter(block.path for block in found)
    return [as_flat(block) if times[block.path] > 1 else block for block in found], [], outputs[0]


def _drift_of(
    loss: Judge, quality: Judge, score: Batches, call: Callable[[nn.Module, Any], Any] | None
) -> Drift | None:
    """Return the `Drift` that judges the model, or None. Raises ValueError for batches or judges that do not fit it."""
    drifts = [judge for judge in (loss, quality) if isinstance(judge, Drift)]
    if len({judge.represent for judge in drifts}) > 1:
        raise ValueError("quality: looks at the output in another way than the loss, both must share one `represent`")
    if len(drifts) == 2 and call is None and score.form is tuple and len(score.names) > 1:
        raise ValueError(
            f"score: a batch is a tuple of {len(score.names)}, the last of them a target that drift does not read;"
            " if it is an input, give dicts, or call=lambda model, batch: model(*batch); if not, give the inputs alone"
        )
    return drifts[0] if drifts else None


def with_removal(subject: Any, proof: BlockProof | None, proven: Proofs) -> tuple[WrappedModel, Proofs]:
    """Prove that heads can be removed. Blocks that fail are tried again with their sizes read in other ways."""
    kinds = [(type(subject.module.get_submodule(block.path)), block.kind) for block in subject.blocks]
    of_kinds = [*zip(kinds, subject.blocks, strict=True)]
    several = {kind for kind, block in of_kinds if block.heads > 1}  # so that those with one may have had several
    hollow = [block.heads == 1 and block.kind == "head" and kind not in several for kind, block in of_kinds]
    blocks = [replace(block, hollow=each) for block, each in zip(subject.blocks, hollow, strict=True)]
    subject = subject.changed(blocks=tuple(blocks)) if any(hollow) else subject
    difference, stuck = prove_removal(proof, subject, subject.prove)
    tries: list[tuple[float, dict[BlockId, str]]] = []
    for look in LOOKS:
        failed = {name for name in stuck if not (block := subject.by_name[name]).why_not and block.kind == "head"}
        if not failed:
            break
        blocks = [look(subject.module, block) if name in failed else block for name, block in subject.by_name.items()]
        looked = subject.changed(blocks=tuple(blocks))
        again, left = prove_removal(proof, looked, subject.prove)
        tries.append((again, left))
        if len(left) < len(stuck):
            subject, difference, stuck = looked, again, left
    for name, reason in stuck.items():
        more: list[tuple[float, str]] = [
            (far, left[name]) for far, left in reversed(tries) if left.get(name, reason) != reason
        ]
        if more:  # that which came nearest, or else the last
            nearest = min(more, key=lambda each: math.inf if math.isnan(each[0]) else each[0])[1]
            stuck[name] = f"{reason}; with its sizes read in other ways: {nearest}"
    if any(subject.by_name[name].flat for name in stuck):  # then at least those of one W_O of each module
        first = {block.path: block.out for block in reversed(subject.blocks)}
        why = "its module computes other heads too, whose sizes cannot be told from these"
        others = [block.flat and block.out != first[block.path] and not block.why_not for block in subject.blocks]
        blocks = [
            replace(block, why_not=why) if other else block for block, other in zip(subject.blocks, others, strict=True)
        ]
        alone = subject.changed(blocks=tuple(blocks))
        again, left = prove_removal(proof, alone, subject.prove)
        if len(left) < len(stuck):
            subject, difference, stuck = alone, again, left
    for name in stuck:
        block = subject.by_name[name]
        if block.in_calls and not block.why_not:
            stuck[name] = f"its heads are computed by several calls of attention, and {stuck[name]}"
    none = all(name in stuck for name, block in subject.by_name.items() if block.heads)
    reasons = [
        f"{subject.by_name[name].path}: {reason}" if subject.by_name[name].why_not else reason
        for name, reason in stuck.items()
    ]
    why_not = reasons[0] if none and reasons else ""
    return subject, proven._replace(difference=difference, stuck=stuck, why_not=why_not)


Look = Callable[[nn.Module, Block], Block]
LOOKS: tuple[Look, ...] = (
    lambda model, block: replace(block, hollow=False),
    *(partial(with_more_counts, words=words) for words in MORE_COUNTS),
    *(lambda model, block, left=left: replace(block, translated=True, as_written=left) for left in (True, False)),
    lambda model, block: block if block.flat else block.meeting(),
    *(
        lambda model, block, words=words: replace(with_more_counts(model, block, words=words), translated=True)
        for words in MORE_COUNTS
    ),
)
"""Other ways to read which sizes in the code of a layer count its heads. The proofs decide whether one is right."""


def call_plainly(model: nn.Module, arguments: Any) -> Any:
    """Call a model with a batch: a dict by names, a tuple without its last part, the target."""
    if isinstance(arguments, Mapping):
        return model(**arguments)
    return model(*(arguments[:-1] or arguments)) if isinstance(arguments, tuple) else model(arguments)


def with_dense(subject: WrappedModel, split: Batches, judge: Drift, batch_size: int = 64) -> Batches:
    """Return the split with the dense model's output for each example."""
    said: list[Tensor] = []
    with torch.no_grad():
        for part in split.batches(batch_size):
            batch = part.converted(subject.device, subject.dtype)
            said.append(precise(judge.represent(subject.run_gated(batch), batch.as_given())))
    return split.with_dense(torch.cat(said))


def _first(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
