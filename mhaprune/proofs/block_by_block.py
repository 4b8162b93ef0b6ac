"""Prove, one attention module after the other, that removing heads equals masking them.

Dimensions: N = all heads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.data import Data
from mhaprune.heads import HeadMask
from mhaprune.hooks.blocks import Block, Unsupported, around, weight_of
from mhaprune.hooks.eval_mode import at_rest
from mhaprune.hooks.gating import hooked
from mhaprune.hooks.pytree import mapped, tensors_in
from mhaprune.measure.outcomes import MAX_DIFFERENCE, relative_difference
from mhaprune.subjects.gated_model import GatedModel
from mhaprune.surgery.copying import as_double, in_double


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

    A module is given the inputs that it really got in a pass over a batch. The first module of each class gets those
    of all examples, and all those of the longest and the shortest: what depends on the number of examples is code, and
    they have the same. The rest of the model has the same weights
    with and without the heads. The rest could still count heads, or read the weights that are gone. So the whole
    smaller model is also run, in its own precision, where only a gross difference can be seen. No copy of the model is
    made: the smaller one shares all weights that were not cut.
    """

    def __init__(self, subject: GatedModel, tried: Data) -> None:
        self.subject, self.tried = subject, tried
        self.batches = [subject.placed(batch) for batch in tried.batches(len(tried))]
        self.given: list[dict[str, tuple[Any, Any]]] = [{} for _ in self.batches]
        """For each batch, the arguments of the first call of each module that holds attention, by its path."""
        self.dtype = subject.dtype
        """The coarsest precision that was seen."""

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
            seen = stack.enter_context(precisions(self.subject))
            for path in {path for block in self.subject.blocks for path in _above(block)}:
                module = self.subject.module.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(recorder(path), with_kwargs=True).remove)
            yield
            self.dtype = max({self.dtype, *seen}, key=eps)

    def of(self, subject: GatedModel) -> BlockProof:
        """Return the proof for the same model with its blocks described in another way."""
        proof = copy.copy(self)
        proof.subject = subject
        return proof

    def recorded_bytes(self) -> int:
        """Return the memory of the recorded inputs."""
        return sum(x.nbytes for given in self.given for x in tensors_in([*given.values()]))

    def recorded(self) -> BlockProof:
        """Return the proof after a pass over each batch."""
        for number, batch in enumerate(self.batches):
            with torch.no_grad(), self.recording(number):
                self.subject.run_gated(batch)
        return self

    def __call__(self, mask: HeadMask, whole: bool = True) -> float:
        """Return the largest `relative_difference` of outputs with these heads masked and with them removed. The whole
        smaller model is run if `whole`, otherwise only the modules that lose heads."""
        smaller = self.subject.without(mask, shared=True)
        gates_N = mask.gates(self.subject.device)
        differences, classes = [0.0], set[type]()
        for block, left in zip(self.subject.blocks, smaller.blocks, strict=True):
            if left.heads < block.heads:
                kind = type(self.subject.module.get_submodule(block.path))
                ends = kind in classes
                differences += [self._difference(smaller, gates_N, block, n, ends) for n in range(len(self.batches))]
                classes.add(kind)
        if whole:
            differences.append(gross_difference(self.subject, smaller, self.batches[0][:1], mask))
        return largest(differences)

    def _difference(self, smaller: GatedModel, gates_N: Tensor, block: Block, number: int, ends: bool) -> float:
        """Compare the smallest module that holds a block, on the batch with this number.

        If it does not run or if it differs, its inputs may depend on the heads, as keys that are made outside of it.
        Then the next larger module decides.
        """
        places = [place for place in _above(block) if place in self.given[number]]
        if not places:
            raise Unsupported(f"{block.path}: no module that holds it is called; try prove='whole'")
        failures, found = [], float("nan")
        size = len(self.batches[number])
        for place in places:
            parts = []
            for only in ([True, False] if ends else [False, True]) if size > 2 else [False]:
                given = self.given[number][place]
                if only:
                    given = mapped(given, lambda x: x[[0, -1]] if x.dim() and len(x) == size else x)
                try:
                    masked = self._outputs(self.subject, place, gates_N, given)
                except Exception as error:  # of a module that may be anybody's, perhaps one for all examples
                    failures += [] if only else [error]
                    continue
                try:
                    removed = self._outputs(smaller, place, None, given)
                    parts.append(largest([relative_difference(a, b) for a, b in zip(masked, removed, strict=True)]))
                except Exception as error:
                    failures.append(error)
                    parts.append(float("nan"))
                if ends:
                    break
            found = largest(parts) if parts else float("nan")
            if found <= MAX_DIFFERENCE:
                return found
        if failures:  # the first, of the smallest module, says most
            raise failures[0]
        return found

    def _outputs(self, subject: GatedModel, place: str, gates_N: Tensor | None, given: tuple[Any, Any]) -> list[Tensor]:
        """Call a module in float64. Return what it returns first, after the outputs of every W_O in it."""
        module = in_double(subject.module.get_submodule(place), of=subject.module)
        start = f"{place}." if place else ""
        blocks = {
            name: replace(
                block,
                path=block.path.removeprefix(place).removeprefix("."),
                out=block.out.removeprefix(start),
                also=tuple(path.removeprefix(start) for path in block.also),
                gate_at=block.gate_at.removeprefix(start),
                call=None,
            )
            for name, block in subject.by_name.items()
            if block.out.startswith(start)
        }
        if subject is not self.subject:
            self._fold_in_double(module, subject, start)
        arguments, named = mapped(given, as_double)
        gates = None if gates_N is None else subject.grid.split(gates_N)
        found: list[Tensor] = []
        with ExitStack() as stack:
            for path in (path for block in blocks.values() for path in block.outs):
                hook = module.get_submodule(path).register_forward_hook(lambda m, x, output: found.append(output))
                stack.callback(hook.remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(AllInDouble())
            stack.enter_context(at_rest(module))
            stack.enter_context(hooked(module, blocks, 1, gates, window=self.subject.window))
            output = module(*arguments, **named)
        return [*found, *list(tensors_in(output))[:1]]

    def _fold_in_double(self, module: nn.Module, smaller: GatedModel, start: str) -> None:
        """Cut the layers with learned gates in a copy in float64 once more: a gate that is folded into a weight of
        float32 is rounded."""
        for block, left in zip(self.subject.blocks, smaller.blocks, strict=True):
            if left.scaled and left.heads < block.heads and block.out.startswith(start):
                columns = [column for head in left.names for column in block.columns[block.names.index(head)]]
                for path in block.outs:
                    whole = as_double(weight_of(self.subject.module.get_submodule(path)))[:, columns]
                    scale = whole.new_tensor(left.scaled).repeat_interleave(left.head_dim)
                    weight_of(module.get_submodule(path.removeprefix(start))).data[:, left.order] = whole * scale
            dense = self.subject.module.get_submodule(block.owner)
            if block.owner.startswith(start) and isinstance(dense, MultiHeadAttention) and dense.gate:
                layer: Any = in_double(dense, of=self.subject.module)
                layer.keep_heads([block.names.index(head) for head in left.names])
                parent, _, name = block.owner.removeprefix(start).rpartition(".")
                setattr(module.get_submodule(parent), name, layer)


@torch.no_grad()
def gross_difference(subject: GatedModel, smaller: GatedModel, batch: Any, mask: HeadMask) -> float:
    """Return the `relative_difference` of the outputs of a model with the heads of a mask closed and without them, in
    its own precision; 0 for one that may be rounding."""
    with precisions(subject) as seen:
        masked, removed = subject.beside(smaller, batch, mask)
    alike = float((masked - removed).abs().max()) <= rounding(masked, max(seen, key=eps))
    return 0.0 if alike else relative_difference(masked, removed)


@contextmanager
def precisions(subject: GatedModel) -> Iterator[set[torch.dtype]]:
    """Yield the precisions that are seen while the context lasts: that of the weights, and those in which W_O answers,
    which under autocast are others."""
    seen = {subject.dtype}

    def said(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.update(x.dtype for x in tensors_in(output) if x.is_floating_point())

    with ExitStack() as stack:
        for path in {path for block in subject.blocks for path in block.outs}:
            stack.callback(subject.module.get_submodule(path).register_forward_hook(said).remove)
        yield seen


def rounding(outputs: Tensor, dtype: torch.dtype) -> float:
    """Return a difference that the rounding of a whole model, which computes in this precision, does not make."""
    one = coarsest(outputs, dtype)
    return min(1000 * one, one**0.5) * max(1.0, float(outputs.abs().max()))


def coarsest(outputs: Tensor, dtype: torch.dtype) -> float:
    """Return the relative rounding of one number: what a model in half precision says may be in float32."""
    return max(map(eps, (outputs.dtype, dtype)))


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def largest(differences: Sequence[float]) -> float:
    """Return the largest of these numbers; NaN if one of them is."""
    return float(torch.tensor(differences, dtype=torch.double).max())


def _above(block: Block) -> list[str]:
    """Return the paths of the modules that hold a block and its W_O, the smallest first; "" is the model."""
    path = around(block.path, *block.outs)
    shared = path.split(".") if path else []
    return [".".join(shared[:length]) for length in range(len(shared), -1, -1)]
