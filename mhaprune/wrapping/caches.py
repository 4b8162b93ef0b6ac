"""The key-value cache of a model of transformers: which layers keep something, for how many positions, how many bytes.

The model is asked: it makes its own cache in one pass, and each layer of it says what it would hold. So a layer that
sees a window, one that reads the keys of another layer, and a tower that keeps nothing count for what they are.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.hooks.blocks import Block
from mhaprune.hooks.eval_mode import at_rest


@dataclass(frozen=True)
class Held:
    """Keys and values that one attention layer keeps."""

    layer: Any
    """Its layer of the cache."""
    bytes_of_part: float
    """The bytes of keys and values of one key-value head, for one position."""

    def positions(self, length: int) -> int:
        """Return how many of `length` positions are kept."""
        fresh = copy.copy(self.layer)
        fresh.is_initialized, fresh.cumulative_length = False, 0
        nothing = torch.empty(1, 1, length, 1)
        fresh.update(nothing, nothing)
        kept: int = fresh.keys.shape[-2]
        return kept


def parts_of(block: Block) -> int:
    """Return the number of key-value heads of a block, a silent one included."""
    keys = block.source("key")
    return len(set(block.of_kv)) if keys is None else len(keys.rows.heads)


def held_by(
    model: nn.Module, blocks: Sequence[Block], arguments: Any, run: Callable[[nn.Module, Any], Any]
) -> dict[str, Held]:
    """Return what each block keeps, by its path; nothing for a model that cannot generate.

    `arguments` is a batch, given by name or, if these are not names of the model, by the user's own function `run`.
    Raises ValueError for a model that cannot be called with a cache.
    """
    modeling_utils = sys.modules.get("transformers.modeling_utils")
    if modeling_utils is None or not isinstance(model, modeling_utils.PreTrainedModel) or not model.can_generate():
        return {}
    found: dict[str, Held] = {}
    attention = {block.path: block for block in blocks if block.attends}
    try:
        named = _named(model, arguments)
        with torch.no_grad(), at_rest(model), _watching(model, attention, found):
            if any(isinstance(x, Tensor) for x in named.values()):
                model(**named, use_cache=True)
            else:
                with _with_cache(model):
                    run(model, arguments)
    except Exception as error:  # of a model that may be anybody's
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"cache_bytes: the model cannot be called with use_cache=True ({reason})") from None
    return found


@contextmanager
def _with_cache(model: nn.Module) -> Iterator[None]:
    """Switch on `use_cache` in the configs of a model while the context lasts."""
    parts: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    configs = {id(config): config for config in parts if hasattr(config, "use_cache")}.values()
    before = [(config, config.use_cache) for config in configs]
    try:
        for config, _ in before:
            config.use_cache = True
        yield
    finally:
        for config, value in before:
            config.use_cache = value


@contextmanager
def _watching(model: nn.Module, attention: Mapping[str, Block], found: dict[str, Held]) -> Iterator[None]:
    from transformers.cache_utils import Cache

    running: list[str] = []
    update: Any = Cache.update

    def updated(cache: Any, keys: Tensor, values: Tensor, layer_idx: int, *arguments: Any, **named: Any) -> Any:
        out = update(cache, keys, values, layer_idx, *arguments, **named)
        if running:
            numbers = sum(x.shape[1] * x.shape[-1] for x in (keys, values)) * keys.itemsize
            found[running[-1]] = Held(cache.layers[layer_idx], numbers / parts_of(attention[running[-1]]))
        return out

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for path in attention:
            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(partial(_enter, running, path)).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.callback(setattr, Cache, "update", update)
        Cache.update = updated
        yield


def _enter(running: list[str], path: str, *_: Any) -> None:
    running.append(path)


def _named(model: Any, arguments: Any) -> dict[str, Any]:
    """Return the arguments that the model takes, without labels, with which some models keep nothing; and the first
    token of a decoder that is given none."""
    names = inspect.signature(model.forward).parameters
    if not isinstance(arguments, Mapping):
        parts = arguments if isinstance(arguments, tuple) else (arguments,)
        arguments = dict(zip(names, parts[:-1] or parts, strict=False))
    named = {name: x for name, x in arguments.items() if name in names and name not in ("labels", "use_cache")}
    config = model.config
    if config.is_encoder_decoder and not any(name.startswith("decoder_input") for name in named):
        first = next(x for x in named.values() if isinstance(x, Tensor))
        start = getattr(config, "decoder_start_token_id", None)
        named["decoder_input_ids"] = torch.full((len(first), 1), start or 0, device=first.device)
    return named
