"""What of a model that others made is timed: a forward pass or generation, in its own precision or another."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mhaprune.adapters.wrapped import WrappedModel, _Last
from mhaprune.timing import many_programs


def timed_as(
    subject: WrappedModel, new_tokens: int | None = None, dtype: torch.dtype | None = None, compiled: bool = False
) -> WrappedModel:
    """The subject with another `predict`: so many new tokens by `generate()` with its cache, in this precision, through
    `torch.compile`. Raises ValueError for what cannot be timed."""
    model, run = subject.model, subject.run
    if new_tokens is not None:
        if new_tokens < 1:
            raise ValueError(f"new_tokens={new_tokens}: must be 1 or more")
        if not (hasattr(model, "can_generate") and model.can_generate()):  # type: ignore[operator]
            raise ValueError(f"new_tokens={new_tokens}: {type(model).__name__} has no generate(), leave it out")
        if compiled:
            raise ValueError(f"new_tokens={new_tokens}: every token would be compiled for itself, leave out compiled")
        run = _Generation(new_tokens)
    if compiled:
        run = _Compiled(run)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype}: must be a torch.dtype of real numbers, for example torch.bfloat16")
    if dtype is not None:
        model = copy.deepcopy(model).to(dtype)
    return replace(subject, model=model, run=run, _last=_Last())


class _Generation:
    """Greedy generation of exactly so many tokens, from what a batch holds for the encoder or as a prompt. The user's
    own `call` has no part in it."""

    def __init__(self, new_tokens: int) -> None:
        self.how = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "use_cache": True}
        self.how |= {"do_sample": False, "num_beams": 1}

    def __call__(self, model: Any, arguments: Any) -> Any:
        if not isinstance(arguments, Mapping):
            raise ValueError("new_tokens: batches must be dicts, as generate() takes them by name")
        named = inspect.signature(model.forward).parameters  # others are read by the loss alone
        given = {key: value for key, value in arguments.items() if key in named and key != "labels"}
        prompt = {key: value for key, value in given.items() if not key.startswith("decoder_")}
        return model.generate(**prompt, **self.how)


class _Compiled:
    """Another call, of a model that is compiled before its first one."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, model: Any, arguments: Any) -> Any:
        if model._compiled_call_impl is None:
            model.compile(dynamic=False)
            model._compiled_call_impl = _Counted(model._compiled_call_impl)
        with many_programs():
            said = self.run(model, arguments)
        if not model._compiled_call_impl.calls:
            raise ValueError("compiled: `call` must call the model itself, model(...), or nothing is compiled")
        return said


class _Counted:
    """Another call, and how often it was made."""

    def __init__(self, call: Any) -> None:
        self.call, self.calls = call, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        return self.call(*arguments, **named)
