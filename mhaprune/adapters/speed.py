"""What of a model that others made is timed: a forward pass or generation, in its own precision or another."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mhaprune.adapters.wrapped import WrappedModel
from mhaprune.timing import many_programs


def timed_as(
    subject: WrappedModel, new_tokens: int | None = None, dtype: torch.dtype | None = None, compiled: bool = False
) -> WrappedModel:
    """The subject with another `predict`: so many new tokens by `generate()` with its cache, in this precision, through
    `torch.compile`. Raises ValueError for a model that does not generate."""
    model, run = subject.model, subject.run
    if new_tokens is not None:
        if not (hasattr(model, "can_generate") and model.can_generate()):  # type: ignore[operator]
            raise ValueError(f"new_tokens={new_tokens}: {type(model).__name__} has no generate(), leave it out")
        run = _Generation(new_tokens)
    if compiled:
        run = _Compiled(run)
    if dtype is not None:
        model = copy.deepcopy(model).to(dtype)
    return replace(subject, model=model, run=run)


class _Generation:
    """Greedy generation of exactly so many tokens, from what a batch holds for the encoder or as a prompt."""

    def __init__(self, new_tokens: int) -> None:
        self.how = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "use_cache": True}

    def __call__(self, model: Any, arguments: Any) -> Any:
        if not isinstance(arguments, Mapping):
            raise ValueError("new_tokens: batches must be dicts, as generate() takes them by name")
        given = {key: value for key, value in arguments.items() if key != "labels" and not key.startswith("decoder_")}
        return model.generate(**given, **self.how)


class _Compiled:
    """Another call, of a model that is compiled before its first one."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, model: nn.Module, arguments: Any) -> Any:
        if model._compiled_call_impl is None:
            model.compile(dynamic=False)
        with many_programs():
            return self.run(model, arguments)
