"""The times of a wrapped model with fewer heads."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from mhaprune.api.scored_heads import ScoredHeads
from mhaprune.heads import HeadMask
from mhaprune.pruning.plans import Plan
from mhaprune.pruning.pruned import time_removed
from mhaprune.tables import QUARTILES, TIMED_NAME
from mhaprune.wrapping.wrapped_model import WrappedModel


def speed_table(
    heads: ScoredHeads,
    chosen: Callable[[], Sequence[HeadMask]],
    batch_sizes: int | Sequence[int],
    rounds: int,
    new_tokens: int | None,
) -> pd.DataFrame:
    """See `Heads.speed`; `chosen` returns masks."""
    batch_sizes = list(batch_sizes) if isinstance(batch_sizes, Iterable) else [batch_sizes]
    if min(batch_sizes, default=0) < 1:
        raise ValueError(f"batch_sizes={min(batch_sizes) if batch_sizes else batch_sizes}: must be 1 or more")
    split = heads.splits.report
    timed = heads.subject if new_tokens is None else generating(heads.subject, new_tokens)
    masks = chosen()
    plans = [Plan("removed", 0, "", mask) for mask in masks]
    what = heads.words[TIMED_NAME] if new_tokens is None else f"{new_tokens} new tokens"
    tables = []
    for size in sorted({len(split.first(size)) for size in batch_sizes}):
        batch = split.first(size).converted(timed.device, timed.dtype)
        table = time_removed(timed, plans, batch, rounds).assign(batch_size=size)
        if new_tokens is not None:
            length = int(batch.lengths().max()) + new_tokens
            kept = [timed.without(mask, shared=True) for mask in (*masks, *[HeadMask(timed.grid)] * 2)]
            table["cache_bytes"] = [subject.cache_bytes(size, length) for subject in kept]
        tables.append(table)
    table = pd.concat(tables, ignore_index=True).rename(columns={"scorer": "model"})
    table["heads_kept"] = len(timed.grid) - table["heads_removed"]
    speed = ["speedup", *(f"speedup{end}" for end in QUARTILES if end)]
    cache = [name for name in ("cache_bytes",) if name in table]
    first = ["model", "latency_ms", "speedup"]  # a narrow terminal leaves out columns in the middle
    return table.assign(timed=what)[[*first, "batch_size", "timed", *cache, "heads_kept", *speed[1:]]]


def generating(subject: WrappedModel, new_tokens: int) -> WrappedModel:
    """Return the subject with another `predict`: greedy generation of exactly `new_tokens` tokens with a cache. It
    reads the encoder's part of a batch, or the prompt. The user's own `call` is not used."""
    if not (hasattr(subject.model, "can_generate") and subject.model.can_generate()):  # type: ignore[operator]
        name = type(subject.model).__name__
        raise ValueError(f"new_tokens={new_tokens}: {name} has no generate(), leave it out")
    how = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "use_cache": True}
    how |= {"do_sample": False, "num_beams": 1}

    def generate(model: Any, arguments: Any) -> Any:
        if not isinstance(arguments, Mapping):
            raise ValueError("new_tokens: batches must be dicts, as generate() takes them by name")
        named = inspect.signature(model.forward).parameters  # only the loss reads the others
        given = {key: value for key, value in arguments.items() if key in named and key != "labels"}
        return model.generate(**{key: value for key, value in given.items() if not key.startswith("decoder_")}, **how)

    return subject.changed(run=generate)
