"""Passes that differ from an open pass only from some block on: they replay the part before it.

A gate has no effect before the output projection of its block is called. Modules that finish before that call return
the same whatever the gate is. So the outermost of these modules return their outputs of the open pass. The result is
equal, bit for bit. Modules that do more than return something are computed again: what they write to, such as an
argument, a dictionary or an attribute, may be read later.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.hooks.eval_mode import HELD, at_rest
from mhaprune.hooks.pytree import features_dim, is_linear, tensors_in


@dataclass
class _Call:
    """A recorded call of a module: the times of its begin and end (counted in begins and ends of calls), its output,
    and for each tensor of the output, how often it had been written to when the call ended."""

    module: nn.Module
    begin: int
    end: int
    output: Any
    versions: list[int] | None

    @property
    def intact(self) -> bool:
        """True if the output is still available and has not been written to in place since the call."""
        return self.versions == _versions(self.output)


@dataclass
class _Running:
    """A call of a module that has begun: when, with what, and the state of what it may write to."""

    begin: int
    arguments: Any
    versions: list[int]
    before: Any
    writes: bool = False
    """True if it, or a module in it, has written to something but tensors that it was given."""


def _written(module: nn.Module, arguments: Any) -> Any:
    """Return what is another value after a call that writes to what its arguments hold, or to attributes of its
    module."""
    own = vars(module)
    tensors = [value for value in own.values() if isinstance(value, Tensor)]
    kept = [(name, _held(value)) for name, value in own.items() if name not in HELD]
    return _held(arguments, 1), kept, _held(own["_buffers"]), _versions([tensors, own["_buffers"]])


def _held(value: Any, depth: int = 0) -> Any:
    """Return the identity of a value and of what it holds. Attributes of objects count up to a `depth`."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Mapping):
        return id(value), [(key, _held(each, depth)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return id(value), [_held(each, depth) for each in value]
    if depth and hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor):
        return id(value), [(name, _held(each)) for name, each in vars(value).items()]
    return id(value)


_COMPUTE = object()
"""A mark for an output that must be computed again."""


class Replay:
    """The outputs of a model's modules in one pass, with the order of their calls."""

    def __init__(self, model: nn.Module, outs: Sequence[str]) -> None:
        self.model, self.outs = model, {model.get_submodule(path): path for path in outs}
        self.begin()

    def begin(self) -> None:
        """Forget the last pass; the next one is recorded."""
        self.calls: list[_Call] = []
        """The recorded calls, in the order in which they ended."""
        self.called: dict[str, int] = {}
        """The time of the first call of each output projection, counted in begins and ends of calls."""
        self._clock, self._running = count(), list[_Running]()

    def enter(self, module: nn.Module, arguments: Any) -> None:
        """Record that the call of a module begins."""
        now = next(self._clock)
        self._running.append(_Running(now, arguments, _versions(arguments), _written(module, arguments)))
        if module in self.outs:
            self.called.setdefault(self.outs[module], now)

    def leave(self, module: nn.Module, output: Any) -> None:
        """Record that the call of a module ends."""
        run = self._running.pop()
        if run.before != _written(module, run.arguments):
            run.writes = True
            for outer in self._running:
                outer.writes = True
        if run.writes or run.versions != _versions(run.arguments):  # a tensor may be one that an outer call has made
            self.calls.append(_Call(module, run.begin, next(self._clock), None, None))
            return
        # This call covers what ended in it after the last output projection.
        uncovered = max([run.begin, *self.called.values()])
        for call in takewhile(lambda call: call.end > uncovered, reversed(self.calls)):
            call.output = call.versions = None
        self.calls.append(_Call(module, run.begin, next(self._clock), output, _versions(output)))

    @contextmanager
    def until(self, outs: Sequence[str]) -> Iterator[None]:
        """While the context lasts, replay all calls that ended before any of the output projections `outs` was first
        called. If none of them was called, replay all calls.

        An output that has been written to in place is computed again.
        """
        last = max((call.end for call in self.calls), default=0)
        end = min((self.called[out] for out in outs if out in self.called), default=last)
        covered, replayed = -1, dict[nn.Module, list[Any]]()
        for call in sorted(self.calls, key=lambda call: call.begin):
            if call.end < end and call.begin > covered:
                if call.intact:
                    covered = call.end
                replayed.setdefault(call.module, []).append(call.output if call.intact else _COMPUTE)
        with ExitStack() as stack:
            for module, outputs in replayed.items():
                stack.enter_context(_playing(module, outputs))
            yield


@contextmanager
def recorders(model: nn.Module) -> Iterator[Callable[[Replay | None], None]]:
    """Put hooks on all modules of a model. Yield a function: after `record(replay)`, calls are recorded in `replay`,
    which is emptied first; after `record(None)`, nothing is recorded.

    The hooks serve many passes, because making them takes longer than a pass of a small model.
    """
    now: Replay | None = None

    def record(replay: Replay | None) -> None:
        nonlocal now
        now = replay
        if now is not None:
            now.begin()

    def enter(module: nn.Module, inputs: Any, named: Any) -> None:
        if now is not None:
            now.enter(module, (inputs, named))

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if now is not None:
            now.leave(module, output)

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            # Before the user's own hooks, which change a replayed output too.
            stack.callback(module.register_forward_hook(leave, prepend=True).remove)
        yield record


@contextmanager
def _playing(module: nn.Module, outputs: Sequence[Any]) -> Iterator[None]:
    """Make the next calls of a module return these outputs; later calls compute again."""
    left, compute = iter(outputs), module.forward
    own = module.__dict__.get("forward")

    def play(*arguments: Any, **named: Any) -> Any:
        output = next(left, _COMPUTE)
        return compute(*arguments, **named) if output is _COMPUTE else output

    module.forward = play
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.forward = own


def _versions(output: Any) -> list[int]:
    """Return how often each tensor of an output has been written to."""
    return [tensor._version for tensor in tensors_in(output)]


LOOKED_AT = 12
"""Number of module inputs that are examined after a map, to find the one that holds the sum of the map's output and the
residual stream."""
NO_READERS = (nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class Map:
    """A linear map that ends a sublayer, and its reader, the first module to read the residual stream after it."""

    path: str
    reader: str | None
    """The path of the reader; None if the output of the map is added to nothing. Without a reader, a refit fits the map
    to its own output.
    """
    call: int = 0
    """The number of the call of the reader in one pass, counted from 0."""


def find_maps(model: nn.Module, outs: Collection[str], run: Callable[[], Any]) -> list[Map]:
    """Return the maps in the order of their calls, found by running a batch: the output projections `outs`, and every
    linear module whose output is added to something before it is read."""
    paths = {module: path for path, module in model.named_modules()}
    pending: list[tuple[str, Tensor, Tensor, list[int]]] = []
    calls: dict[nn.Module, int] = {}
    order: dict[str, Map | None] = {}

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        calls[module] = calls.get(module, -1) + 1
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor) or not x.requires_grad or isinstance(module, NO_READERS):
            return
        for entry in list(pending):
            path, leaf, out, looks = entry
            if leaf.shape != x.shape:
                continue
            looks[0] += 1
            # Not all ones: uniform attention, or half precision, would make sums of weights 1.
            weights = torch.linspace(0.5, 1.5, x.numel(), device=x.device).view(x.shape).to(x)
            (gradient,) = torch.autograd.grad((x * weights).sum(), leaf, retain_graph=True, allow_unused=True)
            itself = x.data_ptr() == out.data_ptr() or torch.equal(x, leaf.to(x.device))  # the first holds also for NaN
            added = gradient is not None and torch.equal(gradient, weights.to(gradient)) and not itself
            if added:
                order[path] = Map(path, paths[module], calls[module])
            if added or looks[0] == LOOKED_AT:
                pending.remove(entry)

    def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):  # a router that is a linear module may return a tuple
            return output
        leaf = output.detach().requires_grad_()
        order.setdefault(paths[module], None)
        pending.append((paths[module], leaf, leaf.clone(), [0]))
        return pending[-1][2]

    with torch.enable_grad(), at_rest(model), ExitStack() as stack:
        for module in model.modules():
            if module is not model:
                stack.callback(module.register_forward_pre_hook(enter).remove)
            if is_linear(module):
                stack.callback(module.register_forward_hook(leave).remove)
        run()
    return [found or Map(path, None) for path, found in order.items() if found is not None or path in outs]


def walk(
    model: nn.Module, maps: Sequence[Map], runs: Sequence[Callable[[], Any]]
) -> Iterator[tuple[Map, list[tuple[Tensor, Tensor]]]]:
    """Yield each map, in forward order, with its input in every pass over a batch and the residual stream after it.

    A pass stops when both are known. The pass for the next map replays the modules that finished before the present map
    was called. It computes the rest with the present weights, which the caller may have changed. So all maps together
    cost little more than one pass. Nothing is replayed if the model calls a reader several times, as with shared
    layers.
    """
    once = not any(each.call for each in maps)
    replays = [Replay(model, [each.path for each in maps]) for _ in runs]
    known: list[str] = []
    with recorders(model) as record:
        for each in maps:
            parts = []
            with at_rest(model):
                for run, replay in zip(runs, replays, strict=True):
                    with replay.until(known[-1:]) if known and once else nullcontext():
                        record(replay)
                        parts.append(_passing(model, each, run))
            record(None)
            known.append(each.path)
            yield each, parts


class _Enough(Exception):
    """An exception that ends a pass early."""


def _passing(model: nn.Module, each: Map, run: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    """Return the input of a map in a pass, and the residual stream that its reader reads."""
    found: dict[str, Tensor] = {}
    calls = iter(range(each.call))
    features = features_dim(model.get_submodule(each.path))

    def of_map(module: Any, read: tuple[Any, ...], output: Tensor) -> None:
        x, *scale = read  # our own W_O is told the learned gates
        found["inputs"] = x * scale[0] if scale else x
        if each.reader is None:
            after = module.bias if getattr(module, "bias_added_after", False) else None
            found["stream"] = output if after is None else output + after
            raise _Enough

    def of_reader(module: nn.Module, read: tuple[Any, ...]) -> None:
        if next(calls, None) is None:
            found["stream"] = read[0]
            raise _Enough

    with ExitStack() as stack:
        stack.callback(model.get_submodule(each.path).register_forward_hook(of_map).remove)
        if each.reader is not None:
            stack.callback(model.get_submodule(each.reader).register_forward_pre_hook(of_reader).remove)
        with suppress(_Enough):
            run()
    return found["inputs"].movedim(features, -1), found["stream"].movedim(features, -1)
