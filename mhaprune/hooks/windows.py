"""Attention in which some key-value heads see only a window of the tokens, and a cache that keeps only this window.

This file imports nothing of mhaprune. A copy of it lies in saved folders, so that they can be read without mhaprune.

Dimensions: B = batch, H = query heads, G = key-value heads, T = queries, U = keys, K = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor


def window_mask(mask: Tensor | None, queries: int, keys: int, sink: int, recent: int, device: Any = None) -> Tensor:
    """Return True where a query sees a key: one of the first `sink` tokens, or of the last `recent` up to itself. It
    broadcasts to (B, H, T, U).

    `mask` is that of causal attention: True where it is open, or numbers to be added. None opens to several queries the
    keys up to their own place, as fused attention does, and to a single one all. Tokens are counted among those that
    the query may see, so padding or another text before them makes no difference.
    """
    if mask is None:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(0 if queries > 1 else keys)
    else:
        seen = opened(mask[..., :keys])
    number = seen.cumsum(dim=-1, dtype=torch.int32)
    return seen & ((number <= sink) | (number[..., -1:] - number < recent))


def opened(mask: Tensor) -> Tensor:
    """Return a mask as booleans. What is added to a closed place is -10,000 or less."""
    return mask if mask.dtype == torch.bool else mask > -1e4


def closed_too(mask: Tensor | None, seen: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a mask (B, H, T, U) that is closed also where `seen` is False, as numbers of `dtype` if that is not None;
    sizes B and H may be 1."""
    seen = seen[(None,) * (4 - seen.dim())]
    if mask is None or mask.dtype == torch.bool:
        if dtype is None:
            return seen
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask[..., : seen.shape[-1]].masked_fill(~seen, torch.finfo(mask.dtype).min)


def attend_in_windows(
    compute: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    of_kv: Sequence[int] | None,
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Compute attention in two parts: of the query heads that see all tokens, and of those that see a window.

    `module.streams` holds `sink`, `recent` and the key-value heads with a window. `of_kv` names the key-value head of
    each query head; None for groups of equal size. `dtype` is for attention that needs a mask of numbers.
    """
    if options.get("position_bias") is not None:
        raise ValueError("streaming heads: attention with a position bias of its own cannot have any")
    sink, recent, *few = module.streams
    held: InWindow | None = getattr(key, "in_window", None)
    all_kv = key.shape[1] + (0 if held is None else len(few))
    parts, order = parts_of(query.shape[1], all_kv, tuple(few), of_kv and tuple(of_kv))
    back = torch.tensor(order, device=query.device)
    outputs, weights = list[Tensor](), list[Tensor | None]()
    for near, *numbers in parts:
        heads, groups, of_groups = (x and torch.tensor(x, device=query.device) for x in numbers)
        keys, values, own = key, value, mask
        if held is None:
            keys, values = key.index_select(1, groups), value.index_select(1, groups)
            if near:
                seen = window_mask(mask, query.shape[2], key.shape[2], sink, recent, key.device)
                own = closed_too(mask, seen, dtype)
        elif near:
            keys, values = held.keys, held.values
            own = held.mask(mask, query.shape[2], sink, recent, dtype)
        if of_groups is not None:
            keys, values = keys.index_select(1, of_groups), values.index_select(1, of_groups)
        output, weight = compute(module, query.index_select(1, heads), keys, values, own, **options)[:2]
        outputs.append(output)
        weights.append(weight)
    together = [weight for weight in weights if weight is not None and weight.shape[-1] == key.shape[2]]
    shown = torch.cat(together, dim=1).index_select(1, back) if len(together) == len(parts) else None
    return torch.cat(outputs, dim=2).index_select(2, back), shown


@lru_cache(maxsize=1024)
def parts_of(heads: int, all_kv: int, few: tuple[int, ...], of_kv: tuple[int, ...] | None) -> Any:
    """Return the parts of attention: whether heads see a window, the heads, their key-value heads, and with `of_kv` the
    place of each head's among these. And the places of all heads in the parts."""
    kv_of = of_kv or [h * all_kv // heads for h in range(heads)]
    parts, order = [], list[int]()
    for near, groups in ((False, [kv for kv in range(all_kv) if kv not in few]), (True, list(few))):
        if mine := [h for h in range(heads) if kv_of[h] in groups]:
            of_groups = None if of_kv is None else [groups.index(kv_of[h]) for h in mine]
            parts.append((near, mine, groups, of_groups))
            order += mine
    return parts, [order.index(h) for h in range(heads)]


class InWindow:
    """The keys and values (B, G, U, K) of heads with a window, and the places (U,) of their `seen` tokens."""

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor | None, seen: int) -> None:
        self.keys, self.values, self.places, self.seen = keys, values, places, seen

    def mask(
        self, mask: Tensor | None, queries: int, sink: int, recent: int, dtype: torch.dtype | None
    ) -> Tensor | None:
        """Return the mask (1, 1, T, U) of the last queries; None if they see all."""
        if mask is not None and not bool(opened(mask)[..., -1, : self.seen].all()):
            raise ValueError("padding: a cache of streaming heads is for prompts of one length, leave it out")
        if self.places is None:
            return None
        at = torch.arange(self.seen - queries, self.seen, device=self.places.device)[:, None]
        seen = (self.places <= at) & ((self.places < sink) | (at - self.places < recent))
        return closed_too(None, seen, dtype)


GROWS = 32
"""The number of tokens by which a cache grows, so that the kept ones are not copied for every new one."""


@cache
def streaming_layer() -> Any:
    """Return the class of a cache layer, which transformers must be installed for."""
    from transformers.cache_utils import DynamicLayer

    class StreamingLayer(DynamicLayer):
        """All tokens of most key-value heads, and a ring of the others, without the oldest after the first `sink`."""

        is_croppable = False

        def __init__(self, sink: int, recent: int, few: Sequence[int]) -> None:
            super().__init__()
            self.sink, self.recent, self.few, self.seen = sink, recent, list(few), 0

        def begin(self, keys: Tensor) -> None:
            """Make empty buffers, of keys and of values, for tokens like these."""
            B, G, _, K = keys.shape
            indices = [g for g in range(G) if g not in self.few], self.few
            self.far, self.near = (torch.tensor(x, dtype=torch.long, device=keys.device) for x in indices)
            self.all = [keys.new_empty(B, len(self.far), 0, K) for _ in range(2)]
            self.ring = [keys.new_zeros(B, len(self.near), self.sink + self.recent, K) for _ in range(2)]
            self.device, self.dtype, self.is_initialized = keys.device, keys.dtype, True

        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            """Keep keys and values (B, G, T, K). Return those of the heads that see all tokens, with the others as
            `in_window`; of the first tokens those of all heads."""
            if not self.is_initialized:
                self.begin(keys)
            start, new = self.seen, [keys, values]
            self.seen = end = start + keys.shape[2]
            if self.all[0].shape[2] < end:
                more = end - start + GROWS
                self.all = [
                    torch.cat([x[:, :, :start], x.new_empty(*x.shape[:2], more, x.shape[3])], 2) for x in self.all
                ]
            for buffer, x in zip(self.all, new, strict=True):
                buffer[:, :, start:end] = x.index_select(1, self.far)
            self.keys, self.values = (buffer[:, :, :end] for buffer in self.all)
            window = self.in_ring(start, [x.index_select(1, self.near) for x in new])
            if start == 0:
                return keys, values
            setattr(self.keys, "in_window", window)  # noqa: B010 - a tensor has no such attribute for mypy
            return self.keys, self.values

        def in_ring(self, start: int, new: Sequence[Tensor]) -> InWindow:
            """Put new tokens into the ring. Return what they see."""
            sink, size, end = self.sink, self.sink + self.recent, self.seen
            if end - start == 1:
                slot = start if start < size else sink + (start - sink) % self.recent
                for ring, x in zip(self.ring, new, strict=True):
                    ring[:, :, slot : slot + 1] = x
                held = [ring[:, :, :end] for ring in self.ring]
                return InWindow(held[0], held[1], None, end)
            slots = torch.arange(min(start, size), device=self.device)
            before = torch.where(slots < sink, slots, start - 1 - (start - 1 - slots) % self.recent)
            places = torch.cat([before, torch.arange(start, end, device=self.device)])
            both = [torch.cat([x[:, :, : len(slots)], y], dim=2) for x, y in zip(self.ring, new, strict=True)]
            stay = ((places < sink) | (places >= end - self.recent)).nonzero()[:, 0]
            to = torch.where(places < sink, places, sink + (places - sink) % self.recent)[stay]
            for ring, x in zip(self.ring, both, strict=True):
                ring.index_copy_(2, to, x.index_select(2, stay))
            return InWindow(both[0], both[1], places, end)

        def get_seq_length(self) -> int:
            return self.seen

        def reset(self) -> None:
            self.seen = 0
            super().reset()

        def crop(self, *_: Any) -> None:
            raise ValueError("a cache of streaming heads has forgotten tokens, so it cannot be cropped")

        def reorder_cache(self, beam_idx: Tensor) -> None:
            if self.is_initialized:
                rows = beam_idx.to(self.device)
                self.all, self.ring = ([x[rows] for x in both] for both in (self.all, self.ring))
                self.keys, self.values = (x[:, :, : self.seen] for x in self.all)

    return StreamingLayer


def streaming_cache(model: Any) -> Any:
    """Return an empty cache for `past_key_values`, in which heads that see a window keep no other tokens."""
    from transformers import DynamicCache

    found = DynamicCache(config=model.config.get_text_config(decoder=True))
    for module in model.modules():
        if streams := getattr(module, "streams", None):
            found.layers[module.layer_idx] = streaming_layer()(streams[0], streams[1], streams[2:])
    return found


DRAFTS = ("is_assistant", "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
OTHERS = ("cache", "past_key_values", "cache_implementation", *DRAFTS)
"""Settings of `generate` with another cache, or one that must be cropped."""


class Generate:
    """The `generate` of a model with streaming heads: unless another cache is asked for, it keeps `streaming_cache`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        name = "cache" if "cache" in signature(self.model.forward).parameters else "past_key_values"
        config = named.get("generation_config") or self.model.generation_config
        asked = {each: named.get(each, getattr(config, each, None)) for each in ("use_cache", "pad_token_id", *OTHERS)}
        ids, real = (*arguments, named.get("inputs", named.get("input_ids")))[0], named.get("attention_mask")
        if real is None and isinstance(ids, Tensor) and asked["pad_token_id"] is not None:
            real = ids != asked["pad_token_id"]
        padded = real is not None and not bool((real != 0).all())
        if not padded and asked["use_cache"] is not False and all(asked[each] in (None, False) for each in OTHERS):
            named[name] = streaming_cache(self.model)
        return type(self.model).generate(self.model, *arguments, **named)
