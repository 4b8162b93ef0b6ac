"""The settings that say how many heads stay, as a user gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

from mhaprune.api.sizes import CacheSize, Cost, Count, Even, PerBlock, Size, Speed
from mhaprune.settings.ranges import Checked, Ge, Gt, check_type
from mhaprune.wrapping.served import Runtime

Number = float | int | None
"""A share or a number; None if it is not given."""
Unit = Literal["head", "group", "block", "call"]


@dataclass(frozen=True)
class Budget(Checked):
    """The number of heads that stay, and the sets in which they are removed.

    Methods of `Heads` take a `Budget`, or its fields by name: `heads.mask(0.5, even=True)`.

    >>> heads.mask(mhaprune.Budget(0.5, even=True)) == heads.mask(0.5, even=True)
    True
    """

    keep: Number = None
    """A share of the heads (0.5), or a number of them (72). None means 0.5, if no other field says how many stay."""
    of: Literal["units", "weights", "operations", "time"] = "units"
    """The things that `keep` counts: heads; or the weights that heads hold; or the products of numbers that they take
    for one token, at the mean length of the *score* split; or the milliseconds that they take on this machine, by an
    estimate. Then the heads with the lowest score per weight, product or millisecond are removed, until at most this
    share or number of them is left."""
    cache_bytes: Number = None
    """In place of `keep`: as many heads stay as fit into a key-value cache of this size, a share of the dense model's,
    or bytes for one example of `context` positions, as `Heads.cache_bytes` returns them."""
    context: Annotated[int, Ge(1)] = 1
    """With `cache_bytes`, the number of positions in the cache. It matters for heads that stream."""
    faster: Annotated[float, Gt(1)] | None = None
    """In place of `keep`: how many times as fast the smaller model is on this machine. Units go in the order of score
    per millisecond, and the model is timed until it is close; `Heads.promises` has what was measured at the end."""
    ms: Annotated[float, Gt(0)] | None = None
    """In place of `faster`: the milliseconds that a call of the smaller model takes on this machine."""
    batch_size: Annotated[int, Ge(1)] = 1
    """With `faster` or `ms`, the number of examples of *score* in a call that is timed."""
    runtime: Runtime | None = None
    """With `faster`, `ms` or `of="time"`, what computes the timed model, by default torch; see `Heads.prune`."""
    unit: Unit | None = None
    """The sets that are removed together, see `Heads.units`; `keep` then counts these."""
    even: bool | dict[Any, Any] = False
    """True if every block keeps the same share of its heads. The pruned model is then a plain one of its library, if
    its config holds the width of a head; where heads share keys, this needs `unit="group"` too. In place of `keep`:
    how many heads a block keeps, by its number or name; blocks that are not named keep all."""
    divisible_by: Annotated[int, Ge(1)] = 1
    """With `even`, a number that divides the number of heads that every block keeps."""
    rescore_every: Annotated[int | None, Ge(1)] = None
    """The number of removed heads after which the smaller model is scored again. None scores only the dense model."""
    over: Literal["all", "worst"] = "all"
    """With `score={name: batches, ...}`, the examples that a score means: all, or for each head those of the kind on
    which it is the most important, see `WorstKind`."""

    @classmethod
    def given(cls, keep: Number | Budget, how: Mapping[str, Any]) -> Budget:
        """Return the budget that the arguments of a method mean. Raises ValueError for an argument that is no field."""
        if isinstance(keep, Budget):
            return replace(keep, **how)
        if unknown := [name for name in how if name not in cls.__dataclass_fields__]:
            raise ValueError(f"{unknown[0]}: is no argument, must be {', '.join(cls.__dataclass_fields__)}")
        return cls(keep, **how)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, hint in get_type_hints(Budget, include_extras=True).items():
            check_type(name, getattr(self, name), hint)
        if self.cache_bytes is not None and (self.keep is not None or isinstance(self.even, dict)):
            raise ValueError(
                f"cache_bytes={self.cache_bytes}: says how many heads stay, as keep= or even= does; give one"
            )
        others = ("keep", "cache_bytes", "even", "ms")[: 4 if self.faster else 3]
        time, more = self.in_time, [name for name in others if getattr(self, name) not in (None, False)]
        if time and more:
            raise ValueError(f"{time}: says how many units stay, leave {more[0]}= out")
        if self.batch_size != 1 and not time and self.of != "time":
            raise ValueError(f"batch_size={self.batch_size}: needs faster=, ms= or of='time'")
        if self.runtime not in (None, "torch") and not time and self.of != "time":
            raise ValueError(f'runtime={self.runtime}: times faster=, ms=, of="time" and within=, leave it out')
        if isinstance(self.even, dict) and self.keep is not None:
            raise ValueError(f"keep={self.keep}: even={self.even} says how many heads stay; leave one of them out")
        if self.of != "units" and (self.even or self.cache_bytes is not None):
            raise ValueError(f"of={self.of}: counts what all blocks together keep, leave even= and cache_bytes= out")
        if self.context > 1 and self.cache_bytes is None:
            raise ValueError(f"context={self.context}: needs cache_bytes=")
        if self.divisible_by > 1 and not self.even:
            raise ValueError(f"divisible_by={self.divisible_by}: needs even=True")

    @property
    def in_time(self) -> str:
        """The setting that says how fast the model shall be; empty if none does."""
        given = {name: value for name in ("faster", "ms") if (value := getattr(self, name)) is not None}
        return ", ".join(f"{name}={value:g}" for name, value in given.items())

    @property
    def size(self) -> Size:
        """The size of the smaller model that these settings mean."""
        keep = 0.5 if self.keep is None else self.keep
        even = Even(keep, self.divisible_by) if self.even is True else None
        if self.in_time:
            return Speed(self.faster, self.ms, self.batch_size)
        if self.cache_bytes is not None:
            return CacheSize(self.cache_bytes, self.context, even)
        if isinstance(self.even, dict):
            return PerBlock(self.even, self.divisible_by)
        if self.of != "units":
            return Cost(keep, self.of, self.batch_size)
        return even or Count(keep)
