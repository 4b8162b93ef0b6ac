"""Speed with fewer heads: forward passes or generation, in the precision of the model or in another."""

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from mhaprune.measure.times import many_programs
from mhaprune.pruning.plans import Plan
from mhaprune.pruning.removal import time_removed
from mhaprune.tables import QUARTILES
from mhaprune.wrapping.batches import Batches
from mhaprune.wrapping.wrapped import WrappedModel


def speed_table(
    timed: WrappedModel, plans: Sequence[Plan], split: Batches, batch_sizes: Iterable[int], rounds: int
) -> pd.DataFrame:
    """One row per batch size and model: the model of each plan, the whole one, and the whole one again."""
    tables = []
    for size in sorted({min(size, len(split)) for size in batch_sizes}):
        batch = split[:size].converted(timed.device, timed.dtype)
        tables.append(time_removed(timed, plans, batch, rounds).assign(batch_size=size))
    table = pd.concat(tables, ignore_index=True).rename(columns={"scorer": "model"})
    table["dtype"] = str(timed.dtype).removeprefix("torch.")
    table["heads_kept"] = len(timed.grid) - table["heads_removed"]
    speed = ["speedup", *(f"speedup{end}" for end in QUARTILES if end)]
    return table[["dtype", "batch_size", "model", "heads_kept", "latency_ms", *speed]]


def timed_as(
    subject: WrappedModel, new_tokens: int | None = None, dtype: torch.dtype | None = None, compiled: bool = False
) -> WrappedModel:
    """The subject with another `predict`: it generates `new_tokens` tokens with a cache, computes in `dtype`, or goes
    through `torch.compile`. Raises ValueError for what cannot be timed."""
    model, run = subject.model, subject.run
    if new_tokens is not None:
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
    return subject.changed(model=model, run=run)


class _Generation:
    """Greedy generation of `new_tokens` tokens, never fewer. It reads the encoder's part of a batch, or the prompt. The
    user's own `call` is not used."""

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
