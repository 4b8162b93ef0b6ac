"""Passes that differ from an open one only from some block on: what comes before is replayed, not computed.

A head writes into the model when the output projection of its block is called. All that was finished before that call
is the same whatever its gate is. So the outermost modules that finish before it return what they returned in an open
pass. The result is equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from torch import nn

from mhaprune.adapters.judging import tensors_in


@dataclass
class _Call:
    """One call of a module: when it began and ended, what it returned, and the versions of those tensors then."""

    module: nn.Module
    begin: int
    end: int
    output: Any
    versions: list[int] | None

    @property
    def intact(self) -> bool:
        """Whether the output is still here, and was not written to in place."""
        return self.versions == _versions(self.output)

    def forget(self) -> None:
        self.output = self.versions = None


_COMPUTE = object()
"""Stands for an output that is computed again."""


class Replay:
    """What the modules of a model returned in one pass, and when."""

    def __init__(self, model: nn.Module, outs: Sequence[str]) -> None:
        self.model, self.outs = model, {model.get_submodule(path): path for path in outs}
        self.calls: list[_Call] = []
        """In the order in which they ended."""
        self.called: dict[str, int] = {}
        """When an output projection was first called."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what is computed while this lasts, as far as it can be replayed."""
        self.calls, self.called = [], {}
        clock, begun = count(), dict[nn.Module, list[int]]()

        def enter(module: nn.Module, inputs: Any) -> None:
            now = next(clock)
            begun.setdefault(module, []).append(now)
            if module in self.outs:
                self.called.setdefault(self.outs[module], now)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            begin = begun[module].pop()
            # This call covers what ended in it after the last output projection.
            uncovered = max([begin, *self.called.values()])
            for call in takewhile(lambda call: call.end > uncovered, reversed(self.calls)):
                call.forget()
            self.calls.append(_Call(module, begin, next(clock), output, _versions(output)))

        with ExitStack() as stack:
            for module in self.model.modules():
                for handle in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave)):
                    stack.callback(handle.remove)
            yield

    @contextmanager
    def until(self, outs: Sequence[str]) -> Iterator[None]:
        """Replay what was finished before the first of these output projections was called; all if there are none.

        An output that was written to since then, in place, is computed again.
        """
        end = min((self.called[out] for out in outs if out in self.called), default=self._end)
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

    @property
    def _end(self) -> int:
        return max((call.end for call in self.calls), default=0)


@contextmanager
def _playing(module: nn.Module, outputs: Sequence[Any]) -> Iterator[None]:
    """The next calls of a module return these outputs; those after them compute again."""
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
    """How often each tensor of an output was written to."""
    return [tensor._version for tensor in tensors_in(output)]
