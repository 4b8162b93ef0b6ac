"""The costs of heads and blocks. They are counted, except for milliseconds, which are measured."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch

from mhaprune.data import Data
from mhaprune.heads import Block, HeadMask
from mhaprune.measure.times import device_name, in_turn
from mhaprune.schedules.budgets import Cost
from mhaprune.storage.cache import Remember, data_digest, sources
from mhaprune.subject import Subject


class Costs:
    """The costs of the heads of a subject, by unit: parameters, floating-point operations for an example of `batch`, or
    milliseconds of one `predict` of `timed`.

    A measured cost is cached, so that a run that continues chooses the same heads.
    """

    def __init__(self, subject: Subject, batch: Data, timed: Data, rounds: int, remember: Remember) -> None:
        self.subject, self.batch, self.timed, self.rounds, self.remember = subject, batch, timed, rounds, remember
        self.known: dict[str, Cost] = {}

    def __call__(self, unit: str) -> Cost:
        counts: dict[str, Callable[[Subject], float]] = {
            "parameters": lambda left: left.count_parameters(),
            "flops": lambda left: left.count_flops(self.batch) / len(self.batch),
        }
        if unit not in self.known:
            self.known[unit] = counted(unit, self.subject, counts[unit]) if unit in counts else self._measured()
        return self.known[unit]

    def table(self) -> pd.DataFrame:
        """Return a table of the costs that were computed so far: one row per unit and block."""
        return pd.DataFrame(
            {"unit": unit, "floor": cost.floor, "block": str(block), "per_block": cost.block[block], "per_head": each}
            for unit, cost in self.known.items()
            for block, each in cost.head.items()
        )

    def _measured(self) -> Cost:
        def make(state: Any, save: Any) -> dict[str, Any]:
            cost = measured(self.subject, self.timed, self.rounds)
            return {"floor": cost.floor, "blocks": [[str(b), cost.block[b], cost.head[b]] for b in cost.head]}

        what = {
            "timed_on": data_digest(self.timed),
            "rounds": self.rounds,
            "device": device_name(self.timed.device),
            "num_threads": torch.get_num_threads(),
            "measured_with": sources(__name__, "mhaprune.measure", "mhaprune.wrapping", type(self.subject).__module__),
        }
        content = self.remember("costs", what, make)
        named = {str(block): block for block in self.subject.grid.blocks}
        own, head = ({named[row[0]]: row[i] for row in content["blocks"]} for i in (1, 2))
        return Cost("ms", content["floor"], own, head)


def counted(unit: str, subject: Subject, count: Callable[[Subject], float]) -> Cost:
    """Return the cost in a unit that can be counted. The cost of a head is `count` of the dense model minus `count` of
    the model without one head of the block. Heads of a block cost the same; the block itself costs nothing."""
    grid, everything = subject.grid, HeadMask(subject.grid)
    dense = count(subject.without(everything))
    per_head = {
        block: dense - count(subject.without(everything.without(grid.heads[positions[0]])))
        for block in grid.blocks
        if (positions := grid.positions(block))
    }
    heads = sum(per_head[head.block] for head in grid)
    return Cost(unit, dense - heads, dict.fromkeys(per_head, 0.0), per_head)


def measured(subject: Subject, batch: Data, rounds: int) -> Cost:
    """Measure the time of one `predict` of the batch, and divide it into a cost of each block and a cost of each head.

    These models take turns: the dense model, the model without any head, and for each block the model without this
    block and the model with one head in it. The fastest round of each model counts, because other processes can only
    add time. The time that the model saves without any head is divided between the blocks, in proportion to the time
    that it saves without each block alone.
    """
    grid, everything = subject.grid, HeadMask(subject.grid)
    models = {"whole": subject.without(everything), "none": subject.without(everything.without(*grid))}
    sizes = {block: len(grid.positions(block)) for block in grid.blocks if len(grid.positions(block))}
    for block in sizes:
        first, *others = (head for head in grid if head.block == block)
        models[f"{block} 0"] = subject.without(everything.without(first, *others))
        models[f"{block} 1"] = subject.without(everything.without(*others))
    calls = {name: partial(model.predict, batch) for name, model in models.items()}
    times = in_turn(calls, rounds, device=batch.device).min()

    def saved(name: str) -> float:
        """Return the time saved by removal, at least zero, because noise must not make a negative cost."""
        return max(0.0, float(times["whole"] - times[name]))

    blocks = {block: saved(f"{block} 0") for block in sizes}
    scale = saved("none") / (sum(blocks.values()) or 1.0)
    head, own = dict[Block, float](), dict[Block, float]()
    for block, size in sizes.items():
        rest = saved(f"{block} 1") / (size - 1) if size > 1 else blocks[block]
        head[block] = scale * min(rest, blocks[block] / size)
        own[block] = scale * blocks[block] - size * head[block]
    return Cost("ms", float(times["whole"]) - scale * sum(blocks.values()), own, head)
