"""Budgets: the numbers of heads to remove, as a user writes them, and as an experiment reads them."""

import math
from collections.abc import Sequence

from mhaprune.heads import is_share


def check_budgets(budgets: Sequence[int | float]) -> None:
    """Raise ValueError unless there is a budget and every one is valid: a fraction from 0.0 to 1.0, or a whole number
    of heads to remove."""
    if not len(budgets):
        raise ValueError("budgets=[]: must name at least one, for example budgets=[0.25,0.5]")
    for budget in budgets:
        if not 0 <= budget <= (1 if is_share(budget) else math.inf):
            raise ValueError(f"budgets={budget}: a fraction must be from 0.0 to 1.0, a number of heads 0 or more")


def heads_to_remove(budgets: Sequence[int | float], num_heads: int, most: int | None = None) -> list[int]:
    """Return budgets as numbers of heads to remove, ascending, without duplicates, and always with 0.

    A fraction becomes the nearest whole number of heads. Raises ValueError for more heads than the model has, or than
    `most`.
    """
    counts = {round(budget * num_heads) if is_share(budget) else int(budget) for budget in budgets}
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
