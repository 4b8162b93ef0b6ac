"""What heads cost in a unit: counted where it can be counted, measured where it takes time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd

from mhaprune.budgets import Cost
from mhaprune.data import Examples
from mhaprune.heads import Block, HeadMask
from mhaprune.scoring import Remember
from mhaprune.speed import in_turn
from mhaprune.subject import Subject


class Costs:
    """What the heads of a subject cost, unit by unit: parameters, floating-point operations of an example of `batch`,
    milliseconds of one `predict` of `timed`. What was measured once is remembered, so that a run that goes on chooses
    the same heads."""

    def __init__(self, subject: Subject, batch: Examples, timed: Examples, rounds: int, remember: Remember) -> None:
        self.subject, self.batch, self.timed, self.rounds, self.remember = subject, batch, timed, rounds, remember
        self.known: dict[str, Cost] = {}

    def __call__(self, unit: str) -> Cost:
        if unit not in self.known:
            makers: dict[str, Callable[[], Cost]] = {
                "parameters": lambda: counted(unit, self.subject, lambda left: left.count_parameters()),
                "flops": lambda: counted(unit, self.subject, self._flops),
                "ms": self._milliseconds,
            }
            self.known[unit] = makers[unit]()
        return self.known[unit]

    def table(self) -> pd.DataFrame:
        """One row per unit and block."""
        return pd.DataFrame(
            {"unit": unit, "floor": cost.floor, "block": str(block), "per_block": cost.block[block], "per_head": each}
            for unit, cost in self.known.items()
            for block, each in cost.head.items()
        )

    def _flops(self, left: Subject) -> float:
        return left.count_flops(self.batch) / len(self.batch)

    def _milliseconds(self) -> Cost:
        def make(state: Any, save: Any) -> dict[str, Any]:
            cost = milliseconds(self.subject, self.timed, self.rounds)
            return {"floor": cost.floor, "blocks": [[str(b), cost.block[b], cost.head[b]] for b in cost.head]}

        what = {"batch": len(self.timed), "rounds": self.rounds, "device": str(self.timed.source.device)}
        content = self.remember("costs", what, make)
        named = {str(block): block for block in self.subject.grid.blocks}
        own, head = ({named[row[0]]: row[i] for row in content["blocks"]} for i in (1, 2))
        return Cost("ms", content["floor"], own, head)


def counted(unit: str, subject: Subject, count: Callable[[Subject], float]) -> Cost:
    """By removing one head of each block: the same for all heads of it, and a block itself costs nothing."""
    grid, everything = subject.grid, HeadMask(subject.grid)
    dense = count(subject.without(everything))
    head = {
        block: dense - count(subject.without(everything.without(grid.heads[positions[0]])))
        for block in grid.blocks
        if (positions := grid.positions(block))
    }
    return Cost(unit, dense - sum(head[one.block] for one in grid), dict.fromkeys(head, 0.0), head)


def milliseconds(subject: Subject, batch: Examples, rounds: int) -> Cost:
    """Of one `predict` of the batch: a sum that says what it costs to have a block at all and each head of it.

    The model without a block, with one head in it and with all of them take turns; medians over the rounds. Blocks are
    taken to cost the same whatever the others hold, so a model whose blocks are all empty, in which even more can be
    left out, is faster than the floor says.
    """
    grid, everything = subject.grid, HeadMask(subject.grid)
    models = {"dense": subject.without(everything)}
    sizes = {block: len(grid.positions(block)) for block in grid.blocks if len(grid.positions(block))}
    for block in sizes:
        first, *others = (head for head in grid if head.block == block)
        models[f"{block} 0"] = subject.without(everything.without(first, *others))
        models[f"{block} 1"] = subject.without(everything.without(*others))
    times = in_turn({name: partial(model.predict, batch) for name, model in models.items()}, rounds)
    head: dict[Block, float] = {}
    own: dict[Block, float] = {}
    for block, size in sizes.items():
        whole = max(0.0, float((times["dense"] - times[f"{block} 0"]).median()))
        rest = max(0.0, float((times["dense"] - times[f"{block} 1"]).median()))
        # Noise must not make a head cost less than nothing, nor the heads more than their block.
        head[block] = min(rest / (size - 1), whole / size) if size > 1 else whole
        own[block] = whole - size * head[block]
    floor = float(times["dense"].median()) - sum(own[block] + size * head[block] for block, size in sizes.items())
    return Cost("ms", floor, own, head)
