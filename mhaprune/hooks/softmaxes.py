"""Find softmaxes that weigh positions: attention in any form, also one in which no head can be found."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mhaprune.hooks.pytree import tensors_in

SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax}
PRODUCTS = {torch.einsum, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.tensordot}
SCALINGS = {torch.mul, Tensor.mul, Tensor.__mul__}
"""Products number by number. One that makes more numbers repeats the weights along the values."""


class Softmaxes(TorchFunctionMode):
    """A mode of torch that records where a softmax over positions is multiplied with values.

    A softmax over classes or experts is none: its length is not that of any sequence that the module reads. `where`
    returns the path of the running module, or None where attention is known already, and the lengths of the sequences
    that it reads.
    """

    def __init__(self, where: Callable[[], tuple[str | None, set[int]]]) -> None:
        super().__init__()
        self.where = where
        self.weights: dict[int, tuple[Tensor, int, str, set[int]]] = {}
        """Results of softmaxes with their length, and what `where` returned, by identity."""
        self.found: dict[str, None] = {}
        """The paths of modules whose weights were multiplied with something."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SOFTMAXES:
            self._begin(out, kwargs.get("dim", args[1] if len(args) > 1 else -1))
        elif func is F.multi_head_attention_forward and (path := self.where()[0]) is not None:
            self.found[path] = None
        elif isinstance(out, Tensor):
            for weights, length, path, lengths in self._in((args, kwargs)):
                if func in PRODUCTS or (func in SCALINGS and out.numel() > weights.numel()):
                    square = weights.dim() > 2 and weights.shape[-1] == weights.shape[-2] == length
                    if length > 1 and (square or length in lengths):
                        self.found[path] = None
                elif out.numel() == weights.numel():
                    self.weights[id(out)] = out, length, path, lengths
                elif fewer_keys(out, weights):
                    self.weights[id(out)] = out, out.shape[-1], path, lengths
        return out

    def known(self, weights: Tensor) -> None:
        """Leave out these weights: they are those of a block."""
        self.weights.pop(id(weights), None)

    def _begin(self, out: Tensor, dim: int) -> None:
        path, lengths = self.where()
        if path is not None:
            self.weights[id(out)] = out, out.shape[dim], path, lengths

    def _in(self, given: Any) -> Iterator[tuple[Tensor, int, str, set[int]]]:
        if self.weights:
            yield from (self.weights[id(x)] for x in tensors_in(given) if id(x) in self.weights)


def fewer_keys(now: Tensor, before: Tensor) -> bool:
    """Return whether a tensor has the shape of attention weights without some keys, such as a sink."""
    return now.dim() == before.dim() > 0 and now.shape[:-1] == before.shape[:-1] and now.shape[-1] < before.shape[-1]


def lengths_in(given: Any) -> set[int]:
    """Return the lengths that sequences in the arguments of a module may have: of ids (B, T), vectors (B, T, D), or
    pixels (B, D, height, width)."""
    lengths: set[int] = set()
    for x in tensors_in(given):
        if x.dim() == 2 and not x.is_floating_point():
            lengths.add(x.shape[1])
        elif x.dim() > 2:
            lengths |= {*x.shape[:-1]}
        if x.dim() == 4:
            lengths |= {x.shape[1] * x.shape[2], x.shape[2] * x.shape[3]}
    return lengths
