"""Budgets: limits on the number of heads or on their cost, and the masks that meet them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mhaprune.heads import Block, HeadGrid, HeadMask

COUNTED_UNITS = ("parameters", "flops")
"""Units that can be counted before a model is trained."""
UNITS = ("heads", *COUNTED_UNITS, "ms")


@dataclass(frozen=True)
class Cost:
    """The cost of a model, from the fields `floor`, `block` and `head`: floor + Σ (block_b + n_b · head_b) over the
    blocks b that have n_b > 0 heads left."""

    unit: str
    """One of `UNITS`."""
    floor: float
    """The cost of the model without heads."""
    block: Mapping[Block, float]
    """The cost of each block that has any heads left, without its heads."""
    head: Mapping[Block, float]
    """The cost of one head of each block."""

    def __call__(self, mask: HeadMask) -> float:
        kept = Counter(head.block for head in mask.kept)
        return self.floor + sum(self.of_block(block, count) for block, count in kept.items())

    def of_block(self, block: Block, count: int) -> float:
        """Return the cost of a block that keeps this number of heads."""
        return self.block[block] + count * self.head[block] if count else 0.0

    @classmethod
    def heads(cls, grid: HeadGrid) -> Cost:
        """Return the cost in heads: every head costs one."""
        return cls("heads", 0, dict.fromkeys(grid.blocks, 0), dict.fromkeys(grid.blocks, 1))


@dataclass(frozen=True)
class Budget:
    """A limit on the cost of a model."""

    name: str
    """The name in tables: the number of heads to remove, or the text that the budget was read from."""
    limit: float
    """The largest cost, in the unit of `cost`."""
    cost: Cost
    """The function that returns the cost of a model."""

    @property
    def most(self) -> float:
        """The limit plus a small margin, so that rounding errors do not decide whether a model meets the budget."""
        return self.limit + 1e-9 * abs(self.limit)

    def met_by(self, mask: HeadMask) -> bool:
        return self.cost(mask) <= self.most

    def heads_kept(self, grid: HeadGrid) -> int:
        """Return roughly how many heads the budget allows, as if every head had the average cost. This average includes
        the costs of blocks. The number is exact if all heads cost the same and blocks cost nothing."""
        whole = self.cost(HeadMask(grid))
        if whole <= self.most:
            return len(grid)
        average = (whole - self.cost.floor) / len(grid) if len(grid) else 0.0
        if average <= 0:  # if the measured time of a head is below the noise
            return 0
        return max(0, len(grid) - math.ceil((whole - self.limit) / average - 1e-9))


def removing(counts: Iterable[int], grid: HeadGrid) -> list[Budget]:
    """Return a budget for each number of heads to remove."""
    return [Budget(str(count), len(grid) - count, Cost.heads(grid)) for count in counts]


def check_budgets(budgets: Sequence[int | float | str]) -> None:
    """Raise ValueError unless there is a budget and every one is valid: a fraction from 0.0 to 1.0, a whole number of
    heads to remove, or a text with the largest cost, such as `12 heads`, `40000 parameters`, `1e6 flops` or `2.5
    ms`."""
    if not len(budgets):
        raise ValueError("budgets=[]: must name at least one, for example budgets=[0.25,0.5]")
    for budget in budgets:
        if isinstance(budget, str):
            _amount(budget)
        elif not 0 <= budget <= (1 if isinstance(budget, float) else math.inf):
            raise ValueError(f"budgets={budget}: a fraction must be from 0.0 to 1.0, a number of heads 0 or more")


def heads_to_remove(budgets: Sequence[int | float], num_heads: int, most: int | None = None) -> list[int]:
    """Return budgets as numbers of heads to remove, ascending, without duplicates, and always with 0.

    A fraction becomes the nearest whole number of heads. Raises ValueError for more heads than the model has, or than
    `most`.
    """
    counts = {round(budget * num_heads) if isinstance(budget, float) else budget for budget in budgets}
    if max(counts, default=0) > num_heads:
        raise ValueError(
            f"experiment.budgets={max(counts)}: the model has {num_heads} heads, allowed are 0 to {num_heads}"
        )
    if most is not None and max(counts, default=0) > most:
        raise ValueError(
            f"experiment.budgets={max(counts)}: with the schedule's keep_at_least heads left in every block only {most}"
            f" of {num_heads} may go, allowed are 0 to {most}"
        )
    return sorted(counts | {0})


def with_a_choice(budgets: Sequence[int | float], num_heads: int) -> list[int]:
    """Return the budgets that remove some heads and keep some, as numbers of heads to remove, ascending.

    Raises ValueError if there are none.
    """
    counts = [count for count in heads_to_remove(budgets, num_heads) if 0 < count < num_heads]
    if not counts:
        raise ValueError(f"experiment.budgets={list(budgets)}: none of them leaves a choice between heads")
    return counts


def in_heads(budgets: Sequence[int | float | str], num_heads: int) -> tuple[list[int | float], list[str]]:
    """Return two lists: the budgets as numbers or shares of heads to remove, and the texts in units other than heads.

    Raises ValueError for a text that would keep more heads than the model has.
    """
    counts: list[int | float] = [budget for budget in budgets if not isinstance(budget, str)]
    texts = []
    for text in (budget for budget in budgets if isinstance(budget, str)):
        limit, unit = _amount(text)
        if unit == "heads" and limit > num_heads:
            raise ValueError(
                f"experiment.budgets={text}: the model has {num_heads} heads, allowed are 0 to {num_heads} heads"
            )
        if unit == "heads":
            counts.append(num_heads - math.floor(limit))
        else:
            texts.append(text)
    return counts, texts


def resolve(budgets: Sequence[int | float | str], smallest: HeadMask, cost: Callable[[str], Cost]) -> list[Budget]:
    """Return `Budget` objects for budgets of every kind, sorted from the largest model to the smallest. `smallest` is
    the mask with the most heads removed that is allowed.

    `cost` returns the `Cost` for a unit. Raises ValueError for a budget below the cost of the smallest model, and for a
    text with a limit above the cost of the dense model.
    """
    grid, most = smallest.grid, len(smallest.removed)
    counts, texts = in_heads(budgets, len(grid))
    resolved = removing(heads_to_remove(counts, len(grid), most), grid)
    for text in dict.fromkeys(texts):
        limit, unit = _amount(text)
        budget = Budget(text, limit, cost(unit))
        least, dense = budget.cost(smallest), budget.cost(HeadMask(grid))
        if not budget.met_by(smallest) or limit > dense * (1 + 1e-9):
            left = f"the {len(grid) - most} heads that must stay" if len(grid) > most else "no heads"
            raise ValueError(
                f"experiment.budgets={text}: a model with {left} costs {least:.6g} {unit}, allowed are {least:.6g} to"
                f" {dense:.6g} {unit}, the cost of the whole model"
            )
        resolved.append(budget)
    return sorted(resolved, key=lambda budget: -budget.heads_kept(grid))


def _amount(budget: str) -> tuple[float, str]:
    found = re.fullmatch(rf"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*({'|'.join(UNITS)})\s*", budget)
    if found is None or found[1].count(".") > 1 or not found[1].strip("."):
        raise ValueError(f"budgets={budget}: a text must be a number and one of {', '.join(UNITS)}")
    amount, unit = float(found[1]), found[2]
    if amount <= 0 and unit != "heads":
        raise ValueError(f"budgets={budget}: must be above 0 {unit}")
    return amount, unit


def unit_of(budget: str) -> str:
    """Return the unit of a budget that is a text."""
    return _amount(budget)[1]
