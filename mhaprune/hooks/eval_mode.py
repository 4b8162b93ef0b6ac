"""Run a model without a trace: as in evaluation, and with its attributes put back afterwards."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, Protocol, Self, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")
HELD = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)}
"""Names of the dictionaries that every module has, most of them empty: tensors, children, hooks."""

_resting: set[tuple[int, bool]] = set()
"""The identities of the models at rest, each with whether this is for gradients of other things than its weights."""


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, without gradients of weights, without a key-value cache, compiled code and
    checkpoints; restore it at the end, with the attributes of its modules."""
    state = (id(model), torch.is_grad_enabled())
    if {state, (id(model), True)} & _resting:  # for one pass of many
        yield
        return
    config = getattr(model, "config", None)
    owners: list[tuple[str, Any]] = [("training", module) for module in model.modules()]
    if torch.is_grad_enabled():
        owners += [("requires_grad", parameter) for parameter in model.parameters()]
    with without_results(model), switched_off([*owners, ("use_cache", config)]), eager(), without_checkpoints():
        _resting.add(state)
        try:
            yield
        finally:
            _resting.discard(state)


class Examples(Protocol):
    """A batch for a model. A slice of it is a smaller batch."""

    def __getitem__(self, rows: slice) -> Self: ...

    def arguments(self) -> Any: ...


@dataclass(frozen=True)
class ModelCall:
    """A model, a batch and a function that calls the model with it. The call can be repeated."""

    model: nn.Module
    batch: Examples
    run: Callable[[nn.Module, Any], Any]

    def __call__(self) -> Any:
        """Call the model, and return what it returns."""
        return self.run(self.model, self.batch.arguments())

    @contextmanager
    def at_rest(self, gradients: bool = False) -> Iterator[None]:
        """Put the model at rest, with or without gradients."""
        with torch.set_grad_enabled(gradients), at_rest(self.model):
            yield

    def of(self, model: nn.Module) -> ModelCall:
        """Return the same call of another model."""
        return replace(self, model=model)

    @property
    def first(self) -> ModelCall:
        """The call with the first example alone."""
        return replace(self, batch=self.batch[:1])


def aside(look: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose calls of torch are no part of the model: no mode sees them. So they take half as long."""

    @wraps(look)
    def unseen(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return look(*args, **kwargs)

    return unseen


def eager() -> Any:
    """Return a context in which compiled modules run as they are written: compiled code has the hooks of the time when
    it was compiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Run parts that are checkpointed as others, while gradients are followed: a checkpoint hides them.

    Functions that others wrote for this are given a part, the number of its inputs, the inputs, and weights. One is
    known by what it returns for a part that returns its own input: this input.
    """
    held, generator = vars(torch.autograd.Function)["apply"], "_checkpoint_without_reentrant_generator"

    def apply(kind: Any, *args: Any, **named: Any) -> Any:
        function = held.__get__(None, kind)
        if len(args) < 2 or not callable(args[0]) or not isinstance(args[1], int):
            return function(*args, **named)
        part, count, *given = args
        echo = None
        with suppress(Exception), warnings.catch_warnings(action="ignore"), torch.no_grad():
            echo = function(lambda x, *_: x.clone(), count, *given, **named)
        if not (isinstance(echo, Tensor) and torch.equal(echo, given[0])):
            return function(*args, **named)
        return part(*(given if isinstance(count, bool) else given[:count]))  # of torch it is a flag

    def nothing(*_: Any) -> Iterator[None]:
        yield

    if not torch.is_grad_enabled():
        yield
        return
    own = {name: value for name, value in vars(torch.utils.checkpoint).items() if name == generator}
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    vars(torch.utils.checkpoint).update(dict.fromkeys(own, nothing))
    try:
        yield
    finally:
        torch.autograd.Function.apply = held  # type: ignore[method-assign]
        vars(torch.utils.checkpoint).update(own)


@contextmanager
def switched_off(attributes: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Set these attributes of these objects to False while the context lasts. Attributes that are missing or not true
    are left alone."""
    changed = [(name, owner) for name, owner in attributes if getattr(owner, name, False)]
    try:
        for name, owner in changed:
            setattr(owner, name, False)
        yield
    finally:
        for name, owner in changed:
            setattr(owner, name, True)


@contextmanager
def without_results(model: nn.Module) -> Iterator[None]:
    """Put back at the end what calls in this context leave in attributes of modules and hangs on a graph, such as
    attention weights, and take tensors off it that calls write to, as caches. A model with such an attribute cannot be
    copied."""
    states = [*map(vars, model.modules())]
    before = [(now, {name: now[name] for name in now.keys() - HELD}) for now in states]
    lists = [(value, value.copy()) for _, held in before for value in held.values() if type(value) is list]
    written = [each for _, held in before for each in held.values()] + [*model.buffers()]
    written = [each for each in written if isinstance(each, Tensor) and each.is_leaf and not each.requires_grad]
    try:
        yield
    finally:
        for now, held in before:
            new = [name for name in now.keys() - HELD if held.get(name, HELD) is not now[name]]
            for name in [name for name in new if _is_result(now[name])]:
                now.pop(name)
                now |= {name: held[name]} if name in held else {}
        for value, items in lists:
            if _is_result(value):
                value[:] = items
        for tensor in written:
            if not tensor.is_leaf:
                with suppress(RuntimeError):  # of a view, which then hangs on a graph as its base does
                    tensor.detach_()


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back at the end all attributes of modules but weights and children, with what their own lists, dictionaries
    and sets hold, buffers and hooks among them. So a pass with other numbers leaves neither a table that it filled, nor
    the flag that says it is full. What is held deeper must be there before, from a plain call."""
    stay = {"_parameters", "_modules"}
    before = [(own, {name: own[name] for name in own.keys() - stay}) for own in map(vars, model.modules())]
    values = [value for _, held in before for value in held.values()]
    holders: list[Any] = [value for value in values if type(value) in (list, dict, set, OrderedDict)]
    items = [value.copy() for value in holders]
    try:
        yield
    finally:
        for now, held in before:
            for name in now.keys() - stay - held.keys():
                del now[name]
            now |= held
        for value, were in zip(holders, items, strict=True):
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(were)


def _is_result(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_leaf
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return any(map(_is_result, parts))
