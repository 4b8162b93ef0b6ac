"""Call a function of one's own at every attention call of a model.

There are three kinds of calls: `F.scaled_dot_product_attention`, which most models use; two matrix products with a
softmax between them, or other weights that are not negative, by whatever function; and the attention interface of
transformers, which knows the calling module.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from mhaprune.hooks.products import Factors
from mhaprune.hooks.softmaxes import SOFTMAXES, fewer_keys
from mhaprune.hooks.windows import opened, window_mask

MAPS = {F.linear, F.conv1d, F.conv2d, torch.conv1d, torch.conv2d}


Attend = Callable[[Tensor, Tensor, Tensor], Any]
"""The original attention, as a function of query, key and value."""
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Made(NamedTuple):
    """A matrix product that may become attention weights: its factors are queries and keys."""

    both: int
    """The number of leading dimensions that both factors have."""
    lead: tuple[int, ...]
    query: Tensor
    key: Tensor


class AttentionCalls(TorchFunctionMode):
    """A mode of torch in which every attention calls `through(attend, query, key, value, options)` instead.

    `attend` is the original function of query, (*lead, T, K), key and value. As a rule the leading dimensions are those
    of examples and heads. Attention is a call of `F.scaled_dot_product_attention`, or two matrix products: the first
    becomes weights that sum to 1, or to less if a sink takes the rest, the second multiplies them with the values. In
    the second form `options` holds the weights, (*lead, T, U), and, if a factor of each head or query multiplies them,
    this factor as `sums`, (*lead, 1 or T, 1), or what a sink takes as `sink`, (*lead, T, 1). Weights that no softmax
    made, such as those of a sigmoid, may have any sums; then there is `of_product`.
    """

    def __init__(self, through: Callable[[Attend, Tensor, Tensor, Tensor, dict[str, Any]], Any]) -> None:
        super().__init__()
        self.through = through
        self.products: dict[tuple[int, ...], Made] = {}
        """The recent matrix products, by their size and last two dimensions."""
        self.made = WeakIdKeyDictionary()
        """The products that a tensor was computed from, number by number (elementwise), by their sizes."""
        self.unmixed = WeakIdKeyDictionary()
        """Those of these tensors that no linear map made, with nothing."""
        self.last_softmax: Callable[[], Tensor | None] = lambda: None
        """Returns the result of the last softmax, or what was computed of it elementwise, perhaps of fewer keys."""
        self.sunk = False
        """True if keys were left out: what is missing of the sum of its weights goes to a sink."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = dict(zip(NAMES, args, strict=False)) | kwargs
            query, key, value = (given.pop(name) for name in NAMES[:3])
            return self.through(lambda q, k, v: func(q, k, v, **given), query, key, value, given)
        if (factors := Factors.of(func, args, kwargs)) is None:
            said = func(*args, **kwargs)
            self._follow(func, [*args, *kwargs.values()], said)
            return said
        for swapped in () if factors.added is not None or not self.products else (False, True):
            weights, value, back, _ = factors.arranged("first", swapped)
            given = factors.other if swapped else factors.one
            known: dict[tuple[int, ...], Made] = self.made.get(given, self.products)
            if (size := _size(weights.shape)) not in known and size not in self.products:
                continue
            made, last = known.get(size) or self.products[size], factors.sums_last(swapped)
            of_product = last and made.both > 0 and given in self.unmixed and size in known
            if options := _weights(weights, last and given is self.last_softmax(), self.sunk, of_product):
                return back(self._weighted(weights, value, options, made)).contiguous()
        of_sizes: dict[tuple[int, ...], Made] = {}
        for swapped in (True, False):
            first, second, _, both = factors.arranged("product", swapped)
            lead = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
            shape = (*lead, first.shape[-2], second.shape[-1])
            of_sizes[_size(shape)] = Made(both, lead, first, second.mT)
        self.products |= of_sizes
        product = func(*args, **kwargs)
        self.made[product], self.unmixed[product] = of_sizes, None
        return product

    def _follow(self, func: Any, given: Sequence[Any], said: Any) -> None:
        """Note what becomes of products, and of the result of a softmax. A linear map of it mixes heads."""
        if isinstance(said, Tensor) and said not in self.made:
            same = [x for x in given if isinstance(x, Tensor) and x.numel() == said.numel() and x in self.made]
            if made := [self.made[x] for x in same]:
                # Of a sum with a product of positions, that which has queries and keys of each example and head.
                sizes = dict.fromkeys(chain(*made))
                best = partial(max, key=lambda each: each.both)
                self.made[said] = {size: best(each[size] for each in made if size in each) for size in sizes}
                if func not in MAPS and any(x in self.unmixed for x in same):
                    self.unmixed[said] = None
        last = self.last_softmax()
        if func in SOFTMAXES:
            self.last_softmax, self.sunk = weakref.ref(said), False
        elif isinstance(said, Tensor) and last is not None and any(x is last for x in given) and func not in MAPS:
            fewer = fewer_keys(said, last)
            if fewer or said.numel() == last.numel():
                self.last_softmax, self.sunk = weakref.ref(said), self.sunk or fewer

    def _weighted(self, weights: Tensor, value: Tensor, options: Any, made: Made) -> Tensor:
        query, key = (_led(x, made.lead, weights.shape[:-2]) for x in (made.query, made.key))
        said: Tensor = self.through(lambda q, k, v: weights @ v, query, key, value, options)
        return said


def _size(shape: Sequence[int]) -> tuple[int, ...]:
    return math.prod(shape), *shape[-2:]


def _led(x: Tensor, lead: Sequence[int], now: Sequence[int]) -> Tensor:
    """Return queries or keys whose product has the leading dimensions `lead` with those that the weights have `now`."""
    if len(lead) == len(now) and all(a in (1, b) for a, b in zip(x.shape, now, strict=False)):
        return x
    return x.expand(*lead, *x.shape[-2:]).reshape(*now, *x.shape[-2:])


def _weights(scores: Tensor, of_softmax: bool, sunk: bool, of_product: bool) -> dict[str, Any]:
    """Return the options of attention with these weights, see `AttentionCalls`; none if they are no weights.

    Weights that are known to come from a softmax (`of_softmax`) may sum to another number for each query, as behind a
    gate, or to 0 for one that sees nothing; and so may weights of 0 and more that were computed elementwise of the
    product of queries and keys (`of_product`), as by a sigmoid. If that softmax had more keys (`sunk`), a sink takes
    what is missing of 1.
    """
    seen = scores.detach()
    sums = seen.sum(dim=-1, keepdim=True, dtype=torch.float)
    positive = bool((seen >= 0).all())
    if positive and of_softmax and sunk:
        return {"weights": scores, "sink": (1 - seen.sum(dim=-1, keepdim=True)).clamp_min(0)}
    of_seen = sums.where(sums != 0, 1)  # a query may see nothing
    if positive and sums.any() and torch.allclose(of_seen, torch.ones_like(sums), atol=5e-3):  # as of bfloat16
        return {"weights": scores}
    first = sums[..., :1, :]
    alike = sums.shape[-2] > 1 and first.any() and torch.allclose(sums, first.expand_as(sums), rtol=5e-3, atol=0)
    if not alike and not (positive and (of_softmax or of_product)):
        return {}
    factor = first if alike else sums
    shares = (scores / factor.where(factor != 0, 1).to(scores)).nan_to_num()
    known = of_softmax or bool((shares >= 0).all())  # differences of two softmaxes may be below 0 (Ye et al. 2025)
    more = {} if of_softmax or alike else {"of_product": True}
    return {"weights": shares, "sums": factor.to(seen)} | more if known else {}


@contextmanager
def attention_interface(through: Callable[[Attend, nn.Module, Tensor, Tensor, Tensor], Any]) -> Iterator[None]:
    """Make every call of the attention interface of transformers call `through(attend, module, query, key, value)`
    instead. No config is changed."""
    modeling_utils = sys.modules.get("transformers.modeling_utils")
    if modeling_utils is None:  # then the model is none of its own, and importing it takes seconds, or fails
        yield
        return
    interface: Any = modeling_utils.AttentionInterface
    original = interface.get_interface

    def get_interface(self: Any, name: str, default: Any) -> Any:
        function = original(self, name, default)

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
                return function(module, q, k, v, *args, **kwargs)

            return through(run, module, query, key, value)

        return attend

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


@contextmanager
def attention_weights(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the attention weights (B, H, T, U) of each call of the modules at these paths while the context lasts.

    The fused function does not return weights, so they are computed from its arguments; in other attention they are
    read.
    """
    found: dict[str, list[Tensor]] = {}
    running: list[str] = []
    latest: dict[str, Tensor] = {}
    names = {model.get_submodule(path): path for path in paths}

    def of_call(attend: Attend, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Any:
        if running and query.dim() == 4:
            latest[running[-1]] = weights_of(query, key, options)
        return attend(query, key, value)

    def of_interface(attend: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Any:
        out, weights, *others = attend(query, key, value)
        if module in names and weights is not None:
            latest[names[module]] = weights
        return (out, weights, *others)

    def leave(*_: Any) -> None:
        if (path := running.pop()) in latest:
            found.setdefault(path, []).append(latest.pop(path))

    with ExitStack() as stack:
        for module, path in names.items():
            stack.callback(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(attention_interface(of_interface))
        stack.enter_context(AttentionCalls(of_call))
        yield found


Window = tuple[int, int]
"""The tokens that a streaming head sees: the first `sink`, and the last `recent` to itself (Xiao et al. 2024)."""


@contextmanager
def attention_in_window(
    model: nn.Module, paths: Sequence[str], window: Window
) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Collect the outputs of all heads (B, H, T, K) of the latest attention call of the modules at these paths: as they
    are, and with only a window of the tokens to see. Raises ValueError for attention that is not causal."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    running: list[str] = []

    def of_call(attend: Attend, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Any:
        whole = attend(query, key, value)
        if running:
            found[running[-1]] = whole, _near(running[-1], query, key, value, options, window)
        return whole

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(AttentionCalls(of_call))
        yield found


def _near(path: str, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any], window: Window) -> Tensor:
    """Return the outputs of the heads, (B, H, T, K), if they see only the window."""
    T, U = query.shape[-2], key.shape[-2]
    if "of_product" in options:
        raise ValueError(f"{path}: its weights are of no softmax, so what a head says of a window is not known")
    now, places = _visible(options, T, U, key.device)
    if T != U:
        raise ValueError(f"{path}: reads a cache, in which its heads have no window; write use_cache=False")
    if query.dim() != 4 or bool(now.triu(1).any()):
        raise ValueError(f"{path}: its heads see more than earlier tokens, so they cannot have a window of these")
    seen, given, weights = window_mask(places, T, U, *window), options.get("attn_mask"), options.get("weights")
    if weights is None:
        mask = seen if given is None or given.dtype == torch.bool else given.masked_fill(~seen, -torch.inf)
        more = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **more)
    inside: Tensor = weights * seen
    total = inside.sum(dim=-1, keepdim=True) + options.get("sink", 0)
    if bool((total == 0).logical_and(seen.any(dim=-1, keepdim=True)).any()):
        raise ValueError(f'{path}: weights in its window are rounded to 0; write attn_implementation="sdpa"')
    said = inside / total.clamp_min(torch.finfo(total.dtype).tiny) @ value
    return said * options["sums"] if "sums" in options else said


def _visible(options: Mapping[str, Any], T: int, U: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the places that each query sees in this call, and the places that are tokens, without padding; both
    broadcast to (B, H, T, U)."""
    given, weights = options.get("attn_mask"), options.get("weights")
    places = torch.ones(T, U, dtype=torch.bool, device=device)
    if weights is None:
        now = places.tril() if options.get("is_causal") else places if given is None else opened(given)
        return now, now
    # Weights of padding are 0 for all queries. A query that sees nothing has equal weights.
    most, least = weights.amax(dim=-1), weights.amin(dim=-1)
    sees = most - least > 10 * torch.finfo(weights.dtype).eps * most
    sees[..., -1] = True  # the last query sees all tokens, perhaps evenly, unless all are padding
    now = (weights != 0) & sees[..., None]
    return now, places.tril() & now.any(dim=(1, 2))[:, None, None]


def weights_of(query: Tensor, key: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return the weights (B, H, T, U) that the fused function uses; 0 at forbidden places."""
    if "weights" in options:
        given: Tensor = options["weights"]
        return given
    T, U, scale = query.shape[-2], key.shape[-2], options.get("scale")
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = options.get("attn_mask")
    if options.get("is_causal"):
        mask = torch.ones(T, U, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1).nan_to_num(0.0)
