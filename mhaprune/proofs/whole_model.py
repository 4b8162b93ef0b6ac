"""Prove that gates have an effect, and that removing heads equals masking them.

Dimensions: N = all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import BlockId, HeadGrid, HeadId, HeadMask
from mhaprune.hooks.blocks import Unsupported
from mhaprune.hooks.gating import hooked
from mhaprune.hooks.pytree import tensors_in
from mhaprune.measure.outcomes import MAX_DIFFERENCE, all_open, apart, gate_effects, joined
from mhaprune.proofs.block_by_block import BlockProof, coarsest, largest, rounding
from mhaprune.subject import Batch
from mhaprune.subjects.gated_model import GatedModel
from mhaprune.surgery.removal import MustKeep

TOUCHED = 2**26
"""The largest number of weights that one mask of the proof leaves in the blocks that it touches."""
MANY = 64
"""The number of units in a block from which the proof draws those that go."""


class Proofs(NamedTuple):
    """The results of the proofs."""

    smallest_effect: float = float("nan")
    """The smallest effect that a gate has on the outputs, without gates that have none. See `gate_effects`."""
    without_effect: tuple[HeadId, ...] = ()
    """The heads whose gates change no output of the examples that were tried."""
    without_gradient: tuple[HeadId, ...] = ()
    """The heads whose gates change outputs that have no derivative in them."""
    beside: bool = False
    """True if the loss or the quality of an example depends on the other examples of its batch."""
    difference: float = float("nan")
    """The largest `relative_difference` of outputs with heads masked and removed; NaN if removal was not tried."""
    stuck: Mapping[BlockId, str] = MappingProxyType({})
    """The blocks whose heads cannot be removed, each with the reason."""
    why_not: str = ""
    """The reason why no head can be removed; an empty text if some can."""


def prove_gates(
    subject: GatedModel, tried: Data, ends: tuple[Any, Any], kind: str
) -> tuple[GatedModel, BlockProof | None, Proofs]:
    """Prove that gates have an effect, and that the output for an example does not depend on the rest of its batch.

    `ends` is what the model returned for the first and for the last example of the first batch, each alone. `kind`
    "whole" computes effects in float64; "none" proves nothing. Returns the subject, which now knows in which dimension
    its blocks hold examples, and a proof that has recorded the inputs of all blocks. Raises `Unsupported` for a model
    whose outputs cannot be compared, and if no gate has an effect; `NotByExample` for neurons that are not gated
    example by example.
    """
    proof, shapes, alone = BlockProof(subject, tried), Shapes(), ends[0]
    if kind == "none":
        two = proof.batches[0][:2]
        for batch in (two, two[:1]):
            with torch.no_grad(), shapes.recording(subject, in_batch=batch is two):
                subject.run_gated(batch)
        return shapes.applied(subject, len(two)), None, Proofs()
    passes, first = [], proof.batches[0]
    for number, batch in enumerate(proof.batches):
        with proof.recording(number), shapes.recording(subject, in_batch=not number):
            passes.append(_comparable(subject, batch))
    outputs = [flat for _, flat in passes]
    judged: Any = subject.in_double() if kind == "whole" else subject
    with shapes.recording(judged, in_batch=False):
        effects_N, again = _effects(judged, first[:1])
    again = again if judged is subject else subject.outputs(first[:1])
    _check_repeated(again, subject.real_outputs(alone, first[:1]), proof.dtype)
    try:
        for row, single in zip((0, -1), ends, strict=True):
            _check_row(first, passes[0][0], row, single, proof.dtype)
    except Unsupported:
        for _ in range(3):  # small random numbers may have been about the same twice
            _check_repeated(subject.outputs(first[:1]), again, proof.dtype)
        raise
    beside = _judged_beside(proof, first, passes[0][0], alone)
    subject = proof.subject = shapes.applied(subject, len(first))
    _check_rows(subject, first, alone)
    idle, no_gradient = _idle(proof, outputs, effects_N)
    if len(subject.grid) and len(idle) == len(subject.grid):
        raise Unsupported(
            "model: closing a head changes no output, whichever head it is: a layer after the heads has only zeros, as"
            " before training, or nothing reads them"
        )
    effective = torch.tensor([head not in idle and head not in no_gradient for head in subject.grid])
    smallest = float(effects_N.cpu()[effective].min()) if effective.any() else float("nan")
    return subject, proof, Proofs(smallest, tuple(idle), tuple(no_gradient), beside)


def prove_removal(proof: BlockProof | None, subject: GatedModel, kind: str) -> tuple[float, dict[BlockId, str]]:
    """Prove that removing heads equals masking them. Return the largest difference, and the blocks whose heads cannot
    be removed, each with the reason.

    All blocks are tried at once. If that fails, those of each class of module and kind of units are tried apart.
    """
    stuck = {name: block.why_not for name, block in subject.by_name.items() if block.why_not}
    if kind == "none" or proof is None:
        return float("nan"), stuck
    free = [name for name, block in subject.by_name.items() if name not in stuck and block.heads]
    if not free:
        return float("nan"), stuck
    prove = subject.removal_proof(proof.tried) if kind == "whole" else None
    difference = proof.of(subject) if prove is None else lambda mask, whole: prove(mask)
    worst, reason = _removed(subject, free, difference)
    if not reason:
        return worst, stuck
    kinds: dict[tuple[type, str], list[BlockId]] = {}
    for name in free:
        block = subject.by_name[name]
        kinds.setdefault((type(subject.module.get_submodule(block.path)), block.kind), []).append(name)
    if len(kinds) == 1:
        return worst, stuck | dict.fromkeys(free, reason)
    worst = 0.0
    for names in kinds.values():
        of_kind, reason = _removed(subject, names, difference)
        if reason:
            stuck |= dict.fromkeys(names, reason)
        else:
            worst = largest([worst, of_kind])
    return worst, stuck


def _removed(
    subject: GatedModel, names: Sequence[BlockId], difference: Callable[[HeadMask, bool], float], apart: bool = False
) -> tuple[float, str]:
    """Return the largest difference when heads of these blocks are removed, and a reason if that is no removal.
    `difference` is told whether to run the whole smaller model too. For `apart` see `_masks`."""
    worst = float("nan")
    differences: list[float] = []
    try:
        for mask, whole in _masks(subject, names, apart):  # one after the other, for memory
            try:
                differences.append(difference(mask, whole))
            except MustKeep:
                if not apart:
                    return _removed(subject, names, difference, apart=True)
                if not differences:
                    raise
        worst = largest(differences)
    except Unsupported as error:
        return worst, str(error)
    except Exception as error:  # of a model that may be anybody's
        if all(subject.by_name[name].kind == "neuron" for name in names):
            block = subject.by_name[names[0]]
            made_by = " and ".join(source.rows.path for source in block.made_by)
            return worst, f"between {made_by} and {block.out}, or beside them, something counts the neurons"
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return worst, f"a model with heads removed does not run ({reason})"
    if not worst <= MAX_DIFFERENCE:
        return worst, f"masked and removed differ by {worst:.3g}, allowed is {MAX_DIFFERENCE:g}"
    return worst, ""


def _idle(proof: BlockProof, outputs: Sequence[Tensor], effects_N: Tensor) -> tuple[list[HeadId], list[HeadId]]:
    """Return the heads that change no output, and those that change outputs without a derivative.

    A derivative of about zero is only a sign: it is also zero behind a rounding, a saturated function or a detached
    tensor, and in half precision. So the heads that have none in any batch are closed: all together, then halves of
    those that change something together, down to single heads.
    """
    subject, batches = proof.subject, proof.batches
    grid, idle, flat = subject.grid, list[HeadId](), list[HeadId]()
    doubtful = _negligible(grid, effects_N)
    for batch in (batches[-1][-1:], *batches):  # first on another example, which is seldom in vain
        if doubtful:
            doubtful &= _negligible(grid, _effects(subject, batch)[0])

    @torch.no_grad()
    def search(heads: Sequence[HeadId]) -> None:
        """Close these heads together. If a bit of an output changes, search each half of them."""
        gates_N = HeadMask(grid, frozenset(heads)).gates(subject.device)
        for batch, before in zip(batches, outputs, strict=True):
            after = subject.outputs(batch, gates_N)
            if torch.equal(after, before):
                continue
            if half := len(heads) // 2:
                search(heads[:half])
                search(heads[half:])
            elif float((after - before).abs().max()) > rounding(before, proof.dtype):
                flat.append(heads[0])
            return
        idle.extend(heads)

    if doubtful:
        search([head for head in grid if head in doubtful])
    return idle, flat


def _negligible(grid: HeadGrid, effects_N: Tensor) -> set[HeadId]:
    """Return the heads whose gates have an effect of about zero."""
    small = effects_N <= torch.finfo(effects_N.dtype).eps * effects_N.max() if len(grid) else effects_N
    return {head for head, each in zip(grid, small.tolist(), strict=True) if each}


def _effects(judged: Any, few: Batch) -> tuple[Tensor, Tensor]:
    """See `gate_effects`. Raises `Unsupported` for a model that does not compute in this precision."""
    try:
        return gate_effects(judged, few)
    except RuntimeError as error:
        precision = str(judged.dtype).removeprefix("torch.")
        reason = str(error).splitlines()[0]
        raise Unsupported(f"model: has no gradients in {precision}, or does not compute in it ({reason})") from None


def _check_repeated(outputs: Tensor, again: Tensor, dtype: torch.dtype) -> None:
    """Raise `Unsupported` if two passes over the same example differ."""
    same = outputs.shape == again.shape
    moved = float((outputs - again).abs().max()) if same else float("inf")
    if moved > 100 * coarsest(outputs, dtype) * max(1.0, float(outputs.abs().max())):
        how = f"differ by {moved:.3g}" if same else "return outputs of different sizes"
        raise Unsupported(
            f"model: two passes over the same examples {how} in evaluation, so scores would be noise: it draws random"
            " numbers, or writes to its batch; fix numbers: call=lambda model, batch: (torch.manual_seed(0),"
            " model(**batch))[1]"
        )


DEPENDS = (
    "model: what it says of an example depends on the other examples of the batch ({moved:.3g} apart from"
    " {apart}), so that no score is one of an example; give batches of one example, or mend what reads the whole batch"
    " (a batch norm, a mean, a limit per batch)"
)


@torch.no_grad()
def check_fullest(subject: GatedModel, batch: Batch, tried: Data, dtype: torch.dtype) -> None:
    """Check the first and the last example of a batch, see `_check_row`, if it has more tokens than what was tried."""
    if len(batch) > 1 and int(batch.lengths().sum()) > int(next(tried.batches(len(tried))).lengths().sum()):
        batch = subject.placed(batch)
        output = subject.run_gated(batch)
        for row in (0, len(batch) - 1):
            _check_row(batch, output, row, subject.run_gated(batch[torch.tensor([row])]), dtype)


def _check_row(batch: Batch, output: Any, row: int, alone: Any, dtype: torch.dtype) -> None:
    """Raise `Unsupported` if what the model says of the example in this row of a batch is not what it says of the
    example alone: then a limit per batch, or what an earlier example leaves, reaches it."""
    for together, single in zip(tensors_in(output), tensors_in(alone), strict=False):
        if moved := _moved(batch, together, row, single, dtype):
            raise Unsupported(DEPENDS.format(moved=moved, apart="the same example alone"))


def _moved(batch: Batch, together: Tensor, row: int, single: Tensor, dtype: torch.dtype) -> float:
    """Return how far a row of a batch is from the example alone, 0 if that is rounding or the rows are no examples."""
    by_row = together.shape[:1] == (len(batch),) and single.shape == (1, *together.shape[1:])
    if not by_row or not together.is_floating_point():
        return 0.0
    moved, finite = apart(together[row][None], single), single.nan_to_num(0.0, 0.0, 0.0)
    # A model in float64 may compute parts in float32.
    allowed = rounding(finite.float() if finite.dtype == torch.double else finite, dtype)
    return 0.0 if moved <= allowed else moved


def _judged_beside(proof: BlockProof, batch: Batch, output: Any, alone: Any) -> bool:
    """Return whether the first example of a batch is judged in another way when it is alone, as by a contrastive
    loss."""
    judge = proof.subject.judge
    judged = zip(judge(output, batch), judge(alone, batch[:1]), strict=True)
    return any(_moved(batch, together, 0, single, proof.dtype) for together, single in judged)


@torch.enable_grad()
def _check_rows(subject: Any, batch: Batch, alone: Any) -> None:
    """Raise `NotByExample` for neurons, or `Unsupported` for heads beside them, if gates of one example change what is
    said of another one: the rows of a block are then not those of the examples, one after the other."""
    if len(batch) < 2 or all(block.kind == "head" for block in subject.blocks):
        return
    gates_BN = all_open(subject, len(batch)).requires_grad_()
    output = subject.run_gated(batch, gates_BN)
    said = [
        (together[0] * torch.linspace(0.5, 1.5, together[0].numel()).to(together).view(together[0].shape)).sum()
        for together, single in zip(tensors_in(output), tensors_in(alone), strict=False)
        if together.requires_grad and single.shape == (1, *together.shape[1:]) and len(together) == len(batch)
    ]
    if not said:
        return
    (moved_BN,) = torch.autograd.grad(torch.stack(said).sum(), gates_BN, materialize_grads=True, allow_unused=True)
    others = moved_BN[1:].abs().amax(dim=0).split(subject.grid.sizes)
    wrong = [block for block, moved in zip(subject.blocks, others, strict=True) if moved.numel() and bool(moved.any())]
    if wrong and all(block.kind == "neuron" for block in wrong):
        raise NotByExample([block.out for block in wrong])
    if wrong:
        raise Unsupported(
            f"{wrong[0].path}: {wrong[0].out} reads the examples in another order than the batch has them, so they"
            " cannot be gated one by one"
        )


@torch.no_grad()
def _comparable(subject: GatedModel, few: Batch) -> tuple[Any, Tensor]:
    """Return the output of a pass, also as one tensor of its real numbers. Raises ValueError for a loss or quality that
    cannot be used, and `Unsupported` for outputs that are empty or not finite."""
    output = subject.run_gated(few)
    joined([subject.judge(output, few)], lambda values: values[0])
    outputs = subject.real_outputs(output, few)
    if not outputs.numel():
        raise Unsupported(
            f"model: returns a {type(output).__name__} with no real numbers to compare, must be a tensor, dict, list or"
            " tuple of these; call= may return a part of it"
        )
    if not outputs.isfinite().all():
        raise Unsupported("model: an output is not finite, so nothing can be compared")
    return output, outputs


def _masks(subject: GatedModel, names: Sequence[BlockId], apart: bool) -> Iterator[tuple[HeadMask, bool]]:
    """Yield the masks of the proof, each with whether the whole smaller model has to run. All these blocks lose heads,
    each another number of them, and keep some, so that heads with the weights of others are seen. A mask touches as
    many blocks as have `TOUCHED` weights left, because what it cuts is copied.

    The last block loses all its heads under one mask and some under another. Two passes over the model are spared if
    it loses all beside others of its class, which keep some: what the model sees of it when it keeps some is then what
    it sees of them, and its own module is enough for the last mask. `apart` it loses all alone, under the last mask.
    """
    everything, grid = HeadMask(subject.grid), subject.grid
    of_block = [(name, heads) for name in names if (heads := [grid.heads[n] for n in grid.positions(name)])]
    held = dict(zip(grid.blocks, (float(part.sum()) for part in subject.held_weights().split(grid.sizes)), strict=True))
    kinds = [type(subject.module.get_submodule(subject.by_name[name].path)) for name, _ in of_block]
    apart = apart or kinds[-1] not in kinds[:-1]
    losses = [_lost(heads, i, 1 + subject.by_name[name].meets) for i, (name, heads) in enumerate(of_block)]
    every: Sequence[HeadId] = of_block[-1][1]
    if not apart:
        losses[-1], every = every, losses[-1]
    gone, touched = list[HeadId](), 0.0
    for (name, heads), lost in zip(of_block, losses, strict=True):
        copied = held[name] * (1 - len(lost) / len(heads))
        if gone and touched + copied > TOUCHED:
            yield everything.without(*gone), True
            gone, touched = [], 0.0
        gone += lost
        touched += copied
    yield everything.without(*gone), True
    yield everything.without(*every), apart
    more = [head for name, heads in of_block if subject.by_name[name].in_calls for head in heads[::-2]]  # counted back
    grouped = {
        kind: (of_kv, heads)
        for kind, (name, heads) in zip(kinds, of_block, strict=True)
        if 1 < len({*(of_kv := subject.by_name[name].of_kv)}) < len(heads) == len(of_kv)
    }
    for of_kv, heads in grouped.values():  # one head of each group, in one block of each class
        more += [head for n, head in enumerate(heads) if of_kv[n] not in of_kv[:n] and head not in more]
    if more:
        yield everything.without(*more), False


def _lost(heads: Sequence[HeadId], number: int, least: int) -> Sequence[HeadId]:
    """Return the heads that the block with this number loses; it keeps `least`, if it has more. Of many units about
    seven eighths go, drawn at random: so each is paired with its weights, and what is left to copy is small."""
    if len(heads) <= MANY:
        return heads[: 1 + number % max(1, len(heads) - least)]
    left = len(heads) // 8 - number % (len(heads) // 8)
    return [heads[n] for n in torch.randperm(len(heads), generator=torch.Generator().manual_seed(number))[left:]]


class NotByExample(Exception):
    """Blocks of neurons whose rows are not the positions of the examples, by their paths."""


class Shapes:
    """The shapes of the inputs of output projections for one example, and for a batch. They tell in which dimension a
    layer holds examples."""

    def __init__(self) -> None:
        self.found: dict[bool, dict[BlockId, torch.Size]] = {True: {}, False: {}}

    @contextmanager
    def recording(self, subject: GatedModel, in_batch: bool) -> Iterator[None]:
        """Record the shapes of a pass over a batch, or over one example."""
        shapes = self.found[in_batch]
        with hooked(subject.module, subject.by_name, 1, seen=lambda name, x: shapes.__setitem__(name, x.shape)):
            yield

    def applied(self, subject: GatedModel, batch_size: int) -> GatedModel:
        """Return the subject with the dimension of examples of each block. Raises `Unsupported` if there is none, and
        `NotByExample` for blocks of neurons without one."""
        blocks, misfits = [], list[str]()
        for name, block in subject.by_name.items():
            one, many = self.found[False].get(name), self.found[True].get(name)
            if batch_size > 1 and one is not None and many is not None:
                dims = [
                    dim
                    for dim in range(len(one) - 1)
                    if many == torch.Size([size * (batch_size if n == dim else 1) for n, size in enumerate(one)])
                ]
                if not dims or (dims[0] > 0 and one[dims[0]] != 1):
                    misfits += [block.out] * (block.kind == "neuron")
                    if misfits:
                        continue
                    raise Unsupported(
                        f"{block.path}: {block.out} reads {tuple(one)} for one example and {tuple(many)} for"
                        f" {batch_size}, so examples cannot be gated one by one"
                    )
                block = replace(block, batch_dim=dims[0])
            blocks.append(block)
        if misfits:
            raise NotByExample(misfits)
        return subject.with_module(subject.module, blocks)
