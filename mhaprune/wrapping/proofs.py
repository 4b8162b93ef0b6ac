"""Prove that gates have an effect, and that removing heads equals masking them.

Dimensions: N = all heads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.data import Data
from mhaprune.heads import Block, HeadId, HeadMask
from mhaprune.measure.outcomes import MAX_DIFFERENCE, gate_effects, joined
from mhaprune.subject import Batch
from mhaprune.wrapping.blocks import AttentionBlock, Unsupported
from mhaprune.wrapping.gated import GatedModel
from mhaprune.wrapping.gating import hooked
from mhaprune.wrapping.removal import as_double, in_double
from mhaprune.wrapping.replay import at_rest, mapped, tensors_in


class Proofs(NamedTuple):
    """The results of the proofs."""

    smallest_effect: float = float("nan")
    """The smallest effect that a gate has on the outputs, without gates that have none. See `gate_effects`."""
    without_effect: tuple[HeadId, ...] = ()
    """The heads whose gates change no output of the examples that were tried."""
    without_gradient: tuple[HeadId, ...] = ()
    """The heads whose gates change outputs that have no derivative in them."""
    difference: float = float("nan")
    """The largest difference between an output with heads masked and the same output with heads removed. NaN if removal
    was not tried."""
    stuck: Mapping[Block, str] = MappingProxyType({})
    """The blocks whose heads cannot be removed, each with the reason."""
    why_not: str = ""
    """The reason why no head can be removed; an empty text if some can."""


def prove_gates(
    subject: GatedModel, tried: Data, alone: Any, kind: str
) -> tuple[GatedModel, BlockProof | None, Proofs]:
    """Prove that gates have an effect, and that the output for an example does not depend on the rest of its batch.

    `alone` is what the model returned for the first example of `tried` alone. `kind` "whole"
    computes effects in float64; "none" proves nothing. Returns the subject, which now knows in which dimension its
    blocks hold examples, and a proof that has recorded the inputs of all blocks. Raises `Unsupported` for a model whose
    outputs cannot be compared, and if no gate has an effect.
    """
    if kind == "none":
        return subject, None, Proofs()
    proof, shapes = BlockProof(subject, tried), Shapes()
    passes, first = [], proof.batches[0]
    for number, batch in enumerate(proof.batches):
        with proof.recording(number), shapes.recording(subject, in_batch=not number):
            passes.append(_comparable(subject, batch))
    outputs = [flat for _, flat in passes]
    judged: Any = subject.in_double() if kind == "whole" else subject
    with shapes.recording(judged, in_batch=False):
        effects_N, again = _effects(judged, first[:1])
    again = again if judged is subject else subject.outputs(first[:1])
    _check_repeated(again, subject.real_outputs(alone, first[:1]))
    _check_independent(subject, first, passes[0][0], alone)
    subject = proof.subject = shapes.applied(subject, len(first))
    idle, no_gradient = _idle(subject, proof.batches, outputs, effects_N)
    if len(subject.grid) and len(idle) == len(subject.grid):
        raise Unsupported(
            "model: closing a head changes no output, whichever head it is: a layer after the heads has only zeros, as"
            " before training, or nothing reads them"
        )
    effective = torch.tensor([head not in idle and head not in no_gradient for head in subject.grid])
    smallest = float(effects_N.cpu()[effective].min()) if effective.any() else float("nan")
    return subject, proof, Proofs(smallest, tuple(idle), tuple(no_gradient))


def prove_removal(proof: BlockProof | None, subject: GatedModel, kind: str) -> tuple[float, dict[Block, str]]:
    """Prove that removing heads equals masking them. Return the largest difference, and the blocks whose heads cannot
    be removed, each with the reason.

    All blocks are tried at once. If that fails, those of each class of attention module are tried apart.
    """
    stuck = {name: block.why_not for name, block in subject.by_name.items() if block.why_not}
    if kind == "none" or proof is None:
        return float("nan"), stuck
    free = [name for name, block in subject.by_name.items() if name not in stuck and block.heads]
    if not free:
        return float("nan"), stuck
    difference = subject.removal_proof(proof.tried) if kind == "whole" else proof.of(subject)
    worst, reason = _removed(subject, free, difference)
    if not reason:
        return worst, stuck
    kinds: dict[type, list[Block]] = {}
    for name in free:
        kinds.setdefault(type(subject.module.get_submodule(subject.by_name[name].path)), []).append(name)
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


def _removed(subject: GatedModel, names: Sequence[Block], difference: Callable[[HeadMask], float]) -> tuple[float, str]:
    """Return the largest difference when heads of these blocks are removed, and a reason if that is no removal."""
    worst = float("nan")
    try:
        worst = largest([difference(mask) for mask in _masks(subject, names)])
    except Unsupported as error:
        return worst, str(error)
    except Exception as error:  # of a model that may be anybody's
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return worst, f"a model with heads removed does not run ({reason})"
    if not worst <= MAX_DIFFERENCE:
        return worst, f"masked and removed differ by {worst:.3g}, allowed is {MAX_DIFFERENCE:g}"
    return worst, ""


def _idle(
    subject: GatedModel, batches: Sequence[Batch], outputs: Sequence[Tensor], effects_N: Tensor
) -> tuple[list[HeadId], list[HeadId]]:
    """Return the heads that change no output, and those that change outputs without a derivative.

    A derivative of about zero is only a sign: it is also zero behind a rounding, a saturated function or a detached
    tensor, and in half precision. So each of these heads is closed, first all of a block together.
    """
    grid, idle, moved = subject.grid, list[HeadId](), list[tuple[HeadId, int]]()
    negligible = effects_N <= torch.finfo(effects_N.dtype).eps * effects_N.max() if len(grid) else effects_N
    doubtful = [head for head, small in zip(grid, negligible.tolist(), strict=True) if small]

    @torch.no_grad()
    def changed(heads: Sequence[HeadId]) -> int | None:
        """Return the number of the first batch in which closing these heads changes a bit of the output."""
        gates_N = HeadMask(grid, frozenset(heads)).gates(subject.device)
        for number, (batch, before) in enumerate(zip(batches, outputs, strict=True)):
            if not torch.equal(subject.outputs(batch, gates_N), before):
                return number
        return None

    for block in dict.fromkeys(head.block for head in doubtful):
        heads = [head for head in doubtful if head.block == block]
        if changed(heads) is None:
            idle += heads
            continue
        for head in heads:
            number = changed([head])
            idle += [head] if number is None else []
            moved += [] if number is None else [(head, number)]
    return idle, [head for head, number in moved if _without_gradient(subject, head, batches[number], outputs[number])]


def _without_gradient(subject: GatedModel, head: HeadId, batch: Batch, before: Tensor) -> bool:
    """Return whether closing a head changes an output by more than rounding, and its derivative is about zero."""
    effects_N, _ = gate_effects(subject, batch)
    with torch.no_grad():
        after = subject.outputs(batch, HeadMask(subject.grid, frozenset([head])).gates(subject.device))
    small = effects_N[subject.grid.index(head)] <= torch.finfo(effects_N.dtype).eps * effects_N.max()
    return bool(small) and float((after - before).abs().max()) > _rounding(before)


def _effects(judged: Any, few: Batch) -> tuple[Tensor, Tensor]:
    """See `gate_effects`. Raises `Unsupported` for a model that does not compute in this precision."""
    try:
        return gate_effects(judged, few)
    except RuntimeError as error:
        precision = str(judged.dtype).removeprefix("torch.")
        reason = str(error).splitlines()[0]
        raise Unsupported(f"model: has no gradients in {precision}, or does not compute in it ({reason})") from None


def _check_repeated(outputs: Tensor, again: Tensor) -> None:
    """Raise `Unsupported` if two passes over the same example differ."""
    same = outputs.shape == again.shape
    moved = float((outputs - again).abs().max()) if same else float("inf")
    if moved > 100 * torch.finfo(outputs.dtype).eps * max(1.0, float(outputs.abs().max())):
        how = f"differ by {moved:.3g}" if same else "return outputs of different sizes"
        raise Unsupported(
            f"model: draws random numbers in evaluation, two passes over the same examples {how}, so scores would be"
            " noise; fix them: call=lambda model, batch: (torch.manual_seed(0), model(**batch))[1]"
        )


def _check_independent(subject: GatedModel, batch: Batch, output: Any, alone: Any) -> None:
    """Raise `Unsupported` if the first example of a batch has another output, loss or quality when it is alone."""
    judged = zip(subject.judge(output, batch), subject.judge(alone, batch[:1]), strict=True)
    pairs = [*zip(tensors_in(output), tensors_in(alone), strict=False), *judged]
    for together, single in pairs:
        by_row = together.shape[:1] == (len(batch),) and single.shape == (1, *together.shape[1:])
        if not by_row or not together.is_floating_point():
            continue
        moved, finite = apart(together[:1], single), single.nan_to_num(0.0, 0.0, 0.0)
        # A model in float64 may compute parts in float32.
        if not moved <= _rounding(finite.float() if finite.dtype == torch.double else finite):
            raise Unsupported(
                f"model: what it says of an example depends on the other examples of the batch ({moved:.3g} apart from"
                " the same example alone), so that no score is one of an example; give batches of one example, or mend"
                " what reads the whole batch (a batch norm, a mean, a limit per batch)"
            )


@torch.no_grad()
def _comparable(subject: GatedModel, few: Batch) -> tuple[Any, Tensor]:
    """Return the output of a pass, also as one tensor of its real numbers. Raises ValueError for a loss or quality that
    cannot be used, and `Unsupported` for outputs that are empty or not finite."""
    output = subject.run_gated(few)
    joined([subject.judge(output, few)], lambda values: values[0])
    outputs = subject.real_outputs(output, few)
    if not outputs.numel():
        raise Unsupported("model: returns no tensor of real numbers, so nothing can be compared")
    if not outputs.isfinite().all():
        raise Unsupported("model: an output is not finite, so nothing can be compared")
    return output, outputs


def _rounding(outputs: Tensor) -> float:
    """Return a difference that the rounding of a whole model does not make."""
    eps = torch.finfo(outputs.dtype).eps
    return min(1000 * eps, eps**0.5) * max(1.0, float(outputs.abs().max()))


def _masks(subject: GatedModel, names: Sequence[Block]) -> list[HeadMask]:
    """Return the masks of the proof. All these blocks lose heads, each another number of them, and the last one loses
    all."""
    everything, grid = HeadMask(subject.grid), subject.grid
    of_block = [[head for head in grid if head.block == name] for name in names]
    *others, last = [heads for heads in of_block if heads] or [[]]
    mask = everything.without(*last, *(head for i, heads in enumerate(others) for head in heads[: 1 + i % len(heads)]))
    return [mask] if others else [everything.without(*last[:1]), mask]


class Shapes:
    """The shapes of the inputs of output projections for one example, and for a batch. They tell in which dimension a
    layer holds examples."""

    def __init__(self) -> None:
        self.found: dict[bool, dict[Block, torch.Size]] = {True: {}, False: {}}

    @contextmanager
    def recording(self, subject: GatedModel, in_batch: bool) -> Iterator[None]:
        """Record the shapes of a pass over a batch, or over one example."""
        shapes = self.found[in_batch]
        with hooked(subject.module, subject.by_name, 1, seen=lambda name, x: shapes.__setitem__(name, x.shape)):
            yield

    def applied(self, subject: GatedModel, batch_size: int) -> GatedModel:
        """Return the subject with the dimension of examples of each block. Raises `Unsupported` if there is none."""
        blocks = []
        for name, block in subject.by_name.items():
            one, many = self.found[False].get(name), self.found[True].get(name)
            if batch_size > 1 and one is not None and many is not None:
                dims = [
                    dim
                    for dim in range(2)
                    if many == torch.Size([size * (batch_size if n == dim else 1) for n, size in enumerate(one)])
                ]
                if not dims or (dims[0] == 1 and one[1] != 1):
                    raise Unsupported(
                        f"{block.path}: {block.out} reads {tuple(one)} for one example and {tuple(many)} for"
                        f" {batch_size}, so examples cannot be gated one by one"
                    )
                block = replace(block, batch_dim=dims[0])
            blocks.append(block)
        return subject.with_module(subject.module, blocks)


class AllInDouble(TorchFunctionMode):
    """A mode of torch in which code that asks for float32, as for a softmax, gets float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = {name: torch.double if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        filled = named.get("fill_value", args[-1] if args else None)
        if func is torch.full and "dtype" not in named and isinstance(filled, float):
            named["dtype"] = torch.double
        if func is Tensor.float:
            return args[0].double()
        return func(*(torch.double if value is torch.float32 else value for value in args), **named)


class BlockProof:
    """A proof that removal equals masking, for one attention module after the other, in float64.

    A module is given the inputs that it really got in a pass over a batch. The rest of the model has the same weights
    with and without the heads. The rest could still count heads, or read the weights that are gone. So the whole
    smaller model is also run, in its own precision, where only a gross difference can be seen. No copy of the model is
    made: the smaller one shares all weights that were not cut.
    """

    def __init__(self, subject: GatedModel, tried: Data) -> None:
        self.subject, self.tried = subject, tried
        self.batches = [subject.placed(batch) for batch in tried.batches(len(tried))]
        self.given: list[dict[str, tuple[Any, Any]]] = [{} for _ in self.batches]
        """For each batch, the arguments of the first call of each module that holds attention, by its path."""

    @contextmanager
    def recording(self, number: int) -> Iterator[None]:
        """Record the inputs of all modules that hold attention, in the pass over a batch that is made in this
        context."""
        given = self.given[number]

        def recorder(path: str) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
            def record(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
                if path not in given:
                    # Without caches, to which a second call would append; cloned, because the model may work in place.
                    named = {name: value for name, value in named.items() if "past" not in name and "cache" not in name}
                    given[path] = mapped((arguments, named), lambda x: x.detach().clone())

            return record

        with ExitStack() as stack:
            for path in {path for block in self.subject.blocks for path in _above(block)}:
                module = self.subject.module.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(recorder(path), with_kwargs=True).remove)
            yield

    def of(self, subject: GatedModel) -> BlockProof:
        """Return the proof for the same model with its blocks described in another way."""
        proof = copy.copy(self)
        proof.subject = subject
        return proof

    def recorded(self) -> BlockProof:
        """Return the proof after a pass over each batch."""
        for number, batch in enumerate(self.batches):
            with torch.no_grad(), self.recording(number):
                self.subject.run_gated(batch)
        return self

    def __call__(self, mask: HeadMask) -> float:
        """Return the largest difference between an output with these heads masked and the same with them removed."""
        smaller = self.subject.without(mask, shared=True)
        gates_N = mask.gates(self.subject.device)
        differences = [0.0]
        for block, left in zip(self.subject.blocks, smaller.blocks, strict=True):
            if left.heads < block.heads:
                differences += [self._difference(smaller, gates_N, block, n) for n in range(len(self.batches))]
        with torch.no_grad():
            one = self.batches[0][:1]
            masked, removed = self.subject.outputs(one, gates_N), smaller.outputs(one)
        gross = float((masked - removed).abs().max())
        if not gross <= _rounding(masked):
            return gross
        return largest(differences)

    def _difference(self, smaller: GatedModel, gates_N: Tensor, block: AttentionBlock, number: int) -> float:
        """Compare the smallest module that holds a block, on the batch with this number.

        If it does not run or if it differs, its inputs may depend on the heads, as keys that are made outside of it.
        Then the next larger module decides.
        """
        places = [place for place in _above(block) if place in self.given[number]]
        if not places:
            raise Unsupported(f"{block.path}: no module that holds it is called; try prove='whole'")
        failures, found = [], float("nan")
        for place in places:
            try:
                found = self._compared(smaller, gates_N, place, number)
            except Exception as error:  # of a module that may be anybody's
                failures.append(error)
            if found <= MAX_DIFFERENCE:
                return found
        if failures:  # the first, of the smallest module, says most
            raise failures[0]
        return found

    def _compared(self, smaller: GatedModel, gates_N: Tensor, place: str, number: int) -> float:
        masked = self._outputs(self.subject, place, gates_N, number)
        removed = self._outputs(smaller, place, None, number)
        return largest([apart(a, b) for a, b in zip(masked, removed, strict=True)])

    def _outputs(self, subject: GatedModel, place: str, gates_N: Tensor | None, number: int) -> list[Tensor]:
        """Call a module in float64. Return what it returns first, after the outputs of every W_O in it."""
        module = in_double(subject.module.get_submodule(place), of=subject.module)
        start = f"{place}." if place else ""
        blocks = {
            name: replace(block, out=block.out.removeprefix(start), call=None)
            for name, block in subject.by_name.items()
            if block.out.startswith(start)
        }
        if subject is not self.subject:
            self._fold_in_double(module, subject, start)
        arguments, named = mapped(self.given[number][place], as_double)
        gates = None if gates_N is None else subject.grid.split(gates_N)
        found: list[Tensor] = []
        with ExitStack() as stack:
            for block in blocks.values():
                hook = module.get_submodule(block.out).register_forward_hook(lambda m, x, output: found.append(output))
                stack.callback(hook.remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(AllInDouble())
            stack.enter_context(at_rest(module))
            stack.enter_context(hooked(module, blocks, len(self.batches[number]), gates))
            output = module(*arguments, **named)
        return [*found, *list(tensors_in(output))[:1]]

    def _fold_in_double(self, module: nn.Module, smaller: GatedModel, start: str) -> None:
        """Cut the layers with learned gates in a copy in float64 once more: a gate that is folded into a weight of
        float32 is rounded."""
        for block, left in zip(self.subject.blocks, smaller.blocks, strict=True):
            dense = self.subject.module.get_submodule(block.owner)
            if block.owner.startswith(start) and isinstance(dense, MultiHeadAttention) and dense.gate:
                layer: Any = in_double(dense, of=self.subject.module)
                layer.keep_heads([block.names.index(head) for head in left.names])
                parent, _, name = block.owner.removeprefix(start).rpartition(".")
                setattr(module.get_submodule(parent), name, layer)


def apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference. Numbers that are not finite, as on padding, must be the same in both."""
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().masked_fill(same, 0).max()) if a.numel() else 0.0


def largest(differences: Sequence[float]) -> float:
    """Return the largest of these numbers; NaN if one of them is."""
    return float(torch.tensor(differences, dtype=torch.double).max())


def _above(block: AttentionBlock) -> list[str]:
    """Return the paths of the modules that hold a block and its W_O, the smallest first; "" is the model."""
    words = zip(block.path.split("."), block.out.split("."), strict=False)
    shared = [word for word, other in takewhile(lambda pair: pair[0] == pair[1], words)]
    return [".".join(shared[:length]) for length in range(len(shared), -1, -1)]
