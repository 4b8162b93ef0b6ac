"""What a run is doing, step within step, for whatever shows it. Nothing is shown here and nothing is computed.

It exists so that a loop of a scorer says how far it is without knowing of terminals, and of the run that it is part of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

Item = TypeVar("Item")
Stages = Mapping[str, float]
"""The steps that a step consists of, in their order, with the seconds that each usually takes."""
NO_STAGES: Stages = MappingProxyType({})


@dataclass(eq=False)
class Step:
    """Something that is being done."""

    what: str
    total: int | None = None
    """The number of items; None where it is not known."""
    done: int = 0
    on: Callable[[], str] | None = None
    """Returns what the present item is called. It is called only when somebody looks."""
    note: str = ""
    """How it goes."""
    stages: Stages = field(default_factory=dict)
    costs: Sequence[float] = ()
    """The cost of each item beside the others; empty if they take alike."""
    spent: dict[str, float] = field(default_factory=dict)
    """The seconds of the stages that are over."""
    begun: float = field(default_factory=lambda: time.monotonic())
    before: int = field(init=False)
    """The items that were done when it began, by an earlier run for example."""

    def __post_init__(self) -> None:
        self.before = self.done

    def advance(self, items: int = 1) -> None:
        """Say that so many more items are done."""
        self.done += items

    @property
    def seconds(self) -> float:
        """How long it has been going on."""
        return time.monotonic() - self.begun


_under_way: list[Step] = []


def under_way() -> list[Step]:
    """The steps that are being done, the outermost first."""
    return list(_under_way)


@contextmanager
def doing(
    what: str, total: int | None = None, stages: Stages = NO_STAGES, done: int = 0, costs: Sequence[float] = ()
) -> Iterator[Step]:
    """The body is a step: of the one around it, if there is one."""
    around = _under_way[-1] if _under_way else None
    step = Step(what, total, done, stages=stages, costs=costs)
    _under_way.append(step)
    try:
        yield step
    finally:
        if step in _under_way:  # a step around it may have ended before, by an error in another generator
            del _under_way[_under_way.index(step) :]
        if around is not None and what in around.stages:
            around.spent[what] = around.spent.get(what, 0.0) + step.seconds


def track(
    items: Iterable[Item],
    what: str,
    total: int | None = None,
    done: int = 0,
    name: Callable[[Item], str] | None = None,
    costs: Sequence[float] = (),
) -> Iterator[Item]:
    """The items, one after the other; what is done with each is an item of the step `what`. `name` names an item."""
    if total is None and isinstance(items, Sized):
        total = done + len(items)
    with doing(what, total, done=done, costs=costs) as step:
        for item in items:
            if name is not None:
                step.on = lambda item=item: name(item)
            yield item
            step.done += 1


def duration(seconds: float) -> str:
    """A time to wait, as exactly as anyone wants to know it."""
    if seconds < 90:
        return f"{max(10, round(seconds, -1)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
