"""Products of two matrices, or stacks of them, in one form, whatever function computes them.

Dimensions: T = rows, D = what is summed over, U = columns; any further dimensions lead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
ADDED = (torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm)
"""Products that are added to something else, their first argument."""


ROW, COLUMN = "row", "column"
"""What stands in place of a letter for a dimension of size 1 that neither factor has."""


class Product(NamedTuple):
    """The product of `first`, (*lead, T, D), and `second`, (*lead, D, U). A dimension that one of them lacks has size 1
    in it."""

    first: Tensor
    second: Tensor
    back: Callable[[Tensor], Tensor]
    """Gives a product (*lead, T, U) the order of dimensions that the function returns."""
    both: int
    """The number of leading dimensions that both factors have."""


@dataclass(frozen=True)
class Factors:
    """The two factors of a product, with a letter for each dimension, as in `torch.einsum`."""

    one: Tensor
    other: Tensor
    letters: tuple[str, str, str]
    """Those of `one`, of `other`, and of their product."""
    added: Tensor | None = None
    """What the product is added to."""

    @classmethod
    def of(cls, function: Any, arguments: Sequence[Any], named: dict[str, Any], least: int = 3) -> Factors | None:
        """Return the factors of a call of a function; None if it is no product of two that have at least so many
        dimensions: 3 for stacks of matrices, 2 for matrices too."""
        if function is torch.einsum:
            equation, *factors = arguments
            factors = [*factors[0]] if len(factors) == 1 and isinstance(factors[0], list | tuple) else factors
            letters = _letters(equation, [x.dim() for x in factors]) if isinstance(equation, str) else None
            return cls(factors[0], factors[1], letters) if letters else None
        if function is torch.tensordot:
            one, other, *dims = [*arguments, *(named[name] for name in ("b", "dims") if name in named)]
            return cls._summed(one, other, dims[0] if dims else 2)
        if function is F.linear and least == 2:
            x, weight, *bias = [*arguments, *(named[name] for name in ("input", "weight", "bias") if name in named)]
            lead = ascii_letters[: x.dim() - 1]
            return cls(x, weight, (f"{lead}Y", "ZY", f"{lead}Z"), bias[0] if bias else None)
        if function not in MATMUL and function not in ADDED:
            return None
        given = [*arguments, *(named[name] for name in ("mat2", "other", "batch1", "batch2") if name in named)]
        one, other = given[-2:] if len(given) > 1 else (None, None)
        if not (isinstance(one, Tensor) and isinstance(other, Tensor) and min(one.dim(), other.dim()) >= least):
            return None
        lead = ascii_letters[: max(one.dim(), other.dim()) - 2]
        mine, theirs = (lead[len(lead) - x.dim() + 2 :] for x in (one, other))
        return cls(one, other, (f"{mine}XY", f"{theirs}YZ", f"{lead}XZ"), given[0] if function in ADDED else None)

    @classmethod
    def _summed(cls, one: Tensor, other: Tensor, dims: Any) -> Factors | None:
        """Return the factors of `torch.tensordot`, which sums over some `dims` of both, or over so many."""
        of_one, of_other = (range(one.dim() - dims, one.dim()), range(dims)) if isinstance(dims, int) else dims
        if not len(of_one) or isinstance(dims, Tensor):
            return None
        mine, theirs = list(ascii_letters[: one.dim()]), list(ascii_letters[one.dim() : one.dim() + other.dim()])
        for n, m in zip(of_one, of_other, strict=True):
            theirs[m] = mine[n]
        out = [each for each in mine if each not in theirs] + [each for each in theirs if each not in mine]
        return cls(one, other, ("".join(mine), "".join(theirs), "".join(out)))

    def sums_last(self, swapped: bool) -> bool:
        """Return whether the last dimension of the first factor, or of the other one if `swapped`, is summed over."""
        last = self.letters[swapped][-1]
        return last in self.letters[not swapped] and last not in self.letters[2]

    def arranged(self, weights: str, swapped: bool = False) -> Product:
        """Return the product with the factors in their order, or `swapped`: transposed.

        If one factor has several dimensions of rows, the last one counts, and the others lead; if it has none, as where
        each pair of positions has a key of its own, there is one row. The dimensions are counted in the attention
        weights: `weights` is "product" if the product becomes these, or "first" if the first factor is.
        """
        a, b, *_ = (self.other, self.one) if swapped else (self.one, self.other)
        la, lb, out = self.letters[1::-1] + self.letters[2:] if swapped else self.letters
        order = out if weights == "product" else la
        summed = [each for each in la if each in lb and each not in out]
        rows = sorted((each for each in la if each not in lb), key=order.index)
        columns = [each for each in (out if weights == "product" else lb) if each in lb and each not in la]
        lead = sorted([*(each for each in la if each in lb and each in out), *rows[:-1]], key=order.index)
        lead += columns[:-1]
        row, column = rows[-1] if rows else ROW, columns[-1] if columns else COLUMN
        first = _ordered(a, la, [*lead, row, *summed]).flatten(len(lead) + 1)
        second = _ordered(b, lb, [*lead, *summed, column]).flatten(len(lead), -2)
        now, single = [*lead, row, column], [n for n, there in ((-2, rows), (-1, columns)) if not there]
        left = [each for each in now if each not in (ROW, COLUMN)]
        both = sum(each in lb and each in out for each in la)
        return Product(first, second, lambda x: x.squeeze(single).permute([left.index(each) for each in out]), both)


class WeightProduct(NamedTuple):
    """A product of a tensor and a weight, with a letter for each dimension, see `Factors`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    of_x: str
    of_weight: str
    of_result: str

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Self]:
        """Return the product that a function of torch is, with either factor as the weight."""
        factors = Factors.of(func, args, kwargs, least=2)
        if factors is None or {"alpha", "beta"} & kwargs.keys():  # of `torch.addmm`
            return []
        (of_one, of_other, result), one, other = factors.letters, factors.one, factors.other
        return [
            cls._of(one, other, factors.added, of_one, of_other, result),
            cls._of(other, one, factors.added, of_other, of_one, result),
        ]

    @classmethod
    def _of(cls, x: Tensor, weight: Tensor, bias: Any, of_x: str, of_weight: str, result: str) -> Self:
        single = [n for n, each in enumerate(of_x) if x.shape[n] == 1 and each in of_weight and each in result]
        left = "".join(each for n, each in enumerate(of_x) if n not in single)  # the weight alone has these dimensions
        return cls(x.squeeze(single) if single else x, weight, bias, left, of_weight, result)

    @property
    def inputs(self) -> str:
        return "".join(each for each in self.of_weight if each in self.of_x and each not in self.of_result)

    @property
    def outputs(self) -> str:
        return "".join(each for each in self.of_weight if each in self.of_result and each not in self.of_x)

    @property
    def kept(self) -> str:
        return "".join(each for each in self.of_x if each not in self.of_weight)

    def matrix(self, weight: Tensor) -> Tensor | None:
        """Return a weight as (O, I); None if the product is no linear map of all its inputs, as if each head has a map
        of its own."""
        order, count = self.outputs + self.inputs, len(self.outputs)
        if not 0 < count < len(order) == len(self.of_weight):
            return None
        dims = [self.of_weight.index(each) for each in order]
        return weight.permute(dims).flatten(0, count - 1).flatten(1)

    def module_of(self, modules: Mapping[Any, nn.Module]) -> Any:
        """Return the module of these, see `places_of`, whose weight is multiplied by, as it is or transposed; None if
        it is of none."""
        if self.weight.dim() != 2:
            return None
        if self.of_weight == self.outputs + self.inputs and self.weight in modules:
            return modules[self.weight]
        return modules.get(place_of(self.matrix(self.weight)))

    def by(self, linear: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the result, computed by a linear module, or another function of inputs (..., I)."""
        x = self.x.permute([self.of_x.index(each) for each in self.kept + self.inputs])
        said = linear(x.flatten(-len(self.inputs)))
        said = said.unflatten(-1, [self.weight.shape[self.of_weight.index(each)] for each in self.outputs])
        return said.permute([(self.kept + self.outputs).index(each) for each in self.of_result])


def place_of(weight: Tensor | None) -> Any:
    """Return where the numbers of a matrix stand in memory, and in which order; None for no numbers, or if they have no
    place, as in an export."""
    if weight is None or not weight.numel():
        return None
    try:
        return (weight.data_ptr(), weight.shape, weight.stride()) if weight.data_ptr() else None
    except RuntimeError:
        return None


def places_of(modules: Iterable[nn.Module]) -> dict[Any, nn.Module]:
    """Return linear modules by their weights and the places of these. A weight that is computed in each call has no
    place that lasts."""
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    plain = [module for module in linear if isinstance(vars(module)["_parameters"].get("weight"), Tensor)]
    return {key: module for module in plain for key in (module.weight, place_of(module.weight)) if key is not None}


def _letters(equation: str, sizes: Sequence[int]) -> tuple[str, str, str] | None:
    """Return the letters of two factors and of their product, with letters in place of dots; None if they make no
    product of matrices."""
    given, arrow, out = equation.replace(" ", "").partition("->")
    factors = given.split(",")
    if len(factors) != 2 or len(sizes) != 2:
        return None
    free = [each for each in ascii_letters if each not in equation]
    hidden = [size - len(each) + 3 if "..." in each else 0 for size, each in zip(sizes, factors, strict=True)]
    dots = "".join(free[: max(hidden)])
    one, other = (each.replace("...", dots[len(dots) - n :]) for n, each in zip(hidden, factors, strict=True))
    if not arrow:
        named = (one + other).translate(dict.fromkeys(map(ord, dots)))
        out = dots + "".join(sorted(each for each in named if named.count(each) == 1))
    out = out.replace("...", dots)
    alone = {*one} ^ {*other}
    whole = all(len({*each}) == len(each) for each in (one, other)) and alone <= {*out}
    summed = {*one} & {*other} - {*out}
    return (one, other, out) if whole and summed and {*one} != {*other} else None


def _ordered(x: Tensor, letters: str, order: Sequence[str]) -> Tensor:
    """Return a tensor with its dimensions in this order, and with new ones of size 1 for letters that it lacks."""
    missing = [each for each in order if each not in letters]
    x = x[(..., *(None for _ in missing))] if missing else x
    place = [*letters, *missing]
    return x.permute([place.index(each) for each in order])
