"""Prove that gates have an effect, and that removing heads equals masking them.

Dimensions: N = all heads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhaprune.heads import HeadId, HeadMask
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
    difference: float = float("nan")
    """The largest difference between an output with heads masked and the same output with heads removed. NaN if removal
    was not tried."""
    why_not: str = ""
    """The reason why heads cannot be removed; an empty text if they can."""


def run_proofs(subject: GatedModel, few: Batch, kind: str) -> Proofs:
    """Prove on two examples that gates have an effect and that removing heads equals masking them.

    `kind` "blocks" compares one attention module after the other in float64, see `BlockProof`; "whole" computes the
    whole model in float64; "none" proves nothing. Raises `Unsupported` for a model whose outputs cannot be compared,
    and if no gate has an effect.
    """
    why_not = next((f"{block.path}: {block.why_not}" for block in subject.blocks if block.why_not), "")
    if kind == "none":
        return Proofs(why_not=why_not)
    outputs = _comparable(subject, few)
    judged: Any = subject.in_double() if kind == "whole" else subject
    proof = BlockProof(subject, few)
    with proof.recording():
        effects_N, again = _effects(judged, few)
    if judged is not subject:
        outputs = _comparable(judged, few)
    moved = float((outputs - again).abs().max())
    if moved > 100 * torch.finfo(outputs.dtype).eps * max(1.0, float(outputs.abs().max())):
        raise Unsupported(
            f"model: draws random numbers in evaluation, two passes over the same examples differ by {moved:.3g}, so"
            " scores would be noise; fix them: call=lambda model, batch: (torch.manual_seed(0), model(**batch))[1]"
        )
    idle = [head for head, effect in zip(subject.grid, effects_N, strict=True) if effect == 0]
    if judged.dtype.itemsize < 4:  # in which a small derivative can be rounded to 0
        closed = {head: HeadMask(subject.grid).without(head).gates(subject.device) for head in idle}
        with torch.no_grad():
            idle = [head for head in idle if torch.equal(judged.outputs(few, closed[head]), outputs)]
    without_effect = tuple(idle)
    if len(subject.grid) and len(without_effect) == len(subject.grid):
        raise Unsupported(
            "model: closing a head changes no output, whichever head it is: its outputs have no gradient, or a layer"
            " after the heads has only zeros, as before training"
        )
    effect = float(effects_N[effects_N > 0].min()) if bool((effects_N > 0).any()) else float("nan")
    worst = float("nan")
    if not why_not:
        try:
            difference = subject.removal_proof(few) if kind == "whole" else proof
            worst = largest([difference(mask) for mask in _masks(subject)])
            if not worst <= MAX_DIFFERENCE:
                why_not = f"masked and removed differ by {worst:.3g}, allowed is {MAX_DIFFERENCE:g}"
        except Unsupported as error:
            why_not = str(error)
        except Exception as error:  # of a model that may be anybody's
            reason = (str(error) or type(error).__name__).splitlines()[0]
            why_not = f"a model with heads removed does not run ({reason})"
    return Proofs(effect, without_effect, worst, why_not)


def _effects(judged: Any, few: Batch) -> tuple[Tensor, Tensor]:
    """See `gate_effects`. Raises `Unsupported` for a model that does not compute in this precision."""
    try:
        return gate_effects(judged, few)
    except RuntimeError as error:
        precision = str(judged.dtype).removeprefix("torch.")
        reason = str(error).splitlines()[0]
        raise Unsupported(f"model: has no gradients in {precision}, or does not compute in it ({reason})") from None


@torch.no_grad()
def _comparable(subject: GatedModel, few: Batch) -> Tensor:
    """Return the outputs of a pass. Raises ValueError for a loss or quality that cannot be used, and `Unsupported` for
    outputs that are empty or not finite."""
    few = subject.placed(few)
    output = subject.run_gated(few)
    joined([subject.judge(output, few)], lambda values: values[0])
    outputs = subject.real_outputs(output, few)
    if not outputs.numel():
        raise Unsupported("model: returns no tensor of real numbers, so nothing can be compared")
    if not outputs.isfinite().all():
        raise Unsupported("model: an output is not finite, so nothing can be compared")
    return outputs


def _rounding(outputs: Tensor) -> float:
    """Return a difference that the rounding of a whole model does not make."""
    eps = torch.finfo(outputs.dtype).eps
    return min(1000 * eps, eps**0.5) * max(1.0, float(outputs.abs().max()))


def _masks(subject: GatedModel) -> list[HeadMask]:
    """Return the masks of the proof. All blocks lose heads, each another number of them, and the last one loses all."""
    everything, grid = HeadMask(subject.grid), subject.grid
    of_block = [[head for head in grid if head.block == block] for block in grid.blocks]
    *others, last = [heads for heads in of_block if heads] or [[]]
    mask = everything.without(*last, *(head for i, heads in enumerate(others) for head in heads[: 1 + i % len(heads)]))
    return [mask] if others else [everything.without(*last[:1]), mask]


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

    A module is given the inputs that it really got in a pass over the batch. The rest of the model has the same weights
    with and without the heads. The rest could still count heads, or read the weights that are gone. So the whole
    smaller model is also run, in its own precision, where only a gross difference can be seen. No copy of the model is
    made: the smaller one shares all weights that were not cut.
    """

    def __init__(self, subject: GatedModel, batch: Batch) -> None:
        self.subject, self.batch = subject, subject.placed(batch)
        self.given: dict[str, tuple[Any, Any]] = {}
        """The arguments of the first call of each module that holds attention, by its path."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the inputs of all modules that hold attention, in the pass that is made in this context."""

        def recorder(path: str) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
            def record(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
                if path not in self.given:
                    # Without caches, to which a second call would append; cloned, because the model may work in place.
                    named = {name: value for name, value in named.items() if "past" not in name and "cache" not in name}
                    self.given[path] = mapped((arguments, named), lambda x: x.detach().clone())

            return record

        with ExitStack() as stack:
            for path in {path for block in self.subject.blocks for path in _above(block)}:
                module = self.subject.module.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(recorder(path), with_kwargs=True).remove)
            yield

    def __call__(self, mask: HeadMask) -> float:
        """Return the largest difference between an output with these heads masked and the same with them removed."""
        smaller = self.subject.without(mask, shared=True)
        gates_N = mask.gates(self.subject.device)
        differences = [0.0]
        for block, left in zip(self.subject.blocks, smaller.blocks, strict=True):
            if left.heads < block.heads:
                differences.append(self._difference(smaller, gates_N, block))
        with torch.no_grad():
            masked, removed = self.subject.outputs(self.batch[:1], gates_N), smaller.outputs(self.batch[:1])
        gross = float((masked - removed).abs().max())
        if not gross <= _rounding(masked):
            return gross
        return largest(differences)

    def _difference(self, smaller: GatedModel, gates_N: Tensor, block: AttentionBlock) -> float:
        """Compare the smallest module that holds a block.

        If it does not run or if it differs, its inputs may depend on the heads, as keys that are made outside of it.
        Then the next larger module decides.
        """
        places = [place for place in _above(block) if place in self.given]
        if not places:
            raise Unsupported(f"{block.path}: no module that holds it is called; try prove='whole'")
        failures, found = [], float("nan")
        for place in places:
            try:
                found = self._compared(smaller, gates_N, place)
            except Exception as error:  # of a module that may be anybody's
                failures.append(error)
            if found <= MAX_DIFFERENCE:
                return found
        if failures:  # the first, of the smallest module, says most
            raise failures[0]
        return found

    def _compared(self, smaller: GatedModel, gates_N: Tensor, place: str) -> float:
        masked, removed = self._outputs(self.subject, place, gates_N), self._outputs(smaller, place, None)
        return largest([apart(a, b) for a, b in zip(masked, removed, strict=True)])

    def _outputs(self, subject: GatedModel, place: str, gates_N: Tensor | None) -> list[Tensor]:
        """Call a module in float64. Return what it returns first, after the outputs of every W_O in it."""
        module = in_double(subject.module.get_submodule(place), of=subject.module)
        start = f"{place}." if place else ""
        blocks = {
            name: replace(block, out=block.out.removeprefix(start))
            for name, block in subject.by_name.items()
            if block.out.startswith(start)
        }
        arguments, named = mapped(self.given[place], as_double)
        gates = None if gates_N is None else subject.grid.split(gates_N)
        found: list[Tensor] = []
        with ExitStack() as stack:
            for block in blocks.values():
                hook = module.get_submodule(block.out).register_forward_hook(lambda m, x, output: found.append(output))
                stack.callback(hook.remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(AllInDouble())
            stack.enter_context(at_rest(module))
            stack.enter_context(hooked(module, blocks, len(self.batch), gates))
            output = module(*arguments, **named)
        return [*found, *list(tensors_in(output))[:1]]


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
