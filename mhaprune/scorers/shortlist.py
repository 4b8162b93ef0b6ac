"""Score: exact where it decides, estimated elsewhere.

Dimensions: E = examples, N = all heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import all_open, gate_gradients, token_gradients
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.replacing import corrupted, rises
from mhaprune.settings.ranges import Ge, Within
from mhaprune.subject import Subject

AT_ONCE = 8
"""Number of heads that are measured before it is asked again how sure the top is."""


@dataclass(frozen=True)
class Shortlist(Scorer):
    """The exact rise of the loss for heads that may be among the `top`, and an estimate for all others.

    The estimate is a first-order one of `patching`, or of `ablation` if `replace` is "zero": the derivative with all
    heads as they are, or its mean with that half of the way to their replacements, whichever is larger. The first
    misses heads that are saturated, the second those that need others.

    What an estimate misses is taken to be normal with a spread in proportion to the parts that cancel in it: the sum of
    the absolute derivatives by token. The heads that were measured say in which proportion. So the heads that are
    measured next are those that most probably belong to the top, until the top is known with the probability `enough`,
    or `checks` are made. The table says which scores are `exact`, and how `sure` it is that the top is among them.
    """

    family: ClassVar[str] = "patching"

    replace: Literal["corrupt", "zero"] = "corrupt"
    """The replacement for the output of a head: its output on the corrupt counterpart, or zeros."""
    top: Annotated[int, Ge(1)] = 10
    """Number of the most important heads that are asked for."""
    checks: Annotated[int, Ge(1)] = 64
    """The largest number of heads that are measured."""
    enough: Annotated[float, Within(0, 1)] = 0.95
    """The probability with which the top is known when no more heads are measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checks < self.top:
            raise ValueError(f"checks={self.checks}: must be top={self.top} or more")

    @property
    def reads_pairs(self) -> bool:
        return self.replace == "corrupt"

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        replacement = corrupted(examples) if self.reads_pairs else None
        slopes_EN, sizes_EN = token_gradients(subject, examples, replacement=replacement)
        half_EN = gate_gradients(subject, examples, all_open(subject, 1)[0] / 2, replacement=replacement)
        ways = -slopes_EN, -(slopes_EN + half_EN) / 2
        values_EN = torch.where(ways[1].mean(dim=0) > ways[0].mean(dim=0), ways[1], ways[0])
        guess_N, sizes_N = values_EN.mean(dim=0), sizes_EN.mean(dim=0)
        order, checked, sure = guess_N.argsort(descending=True).tolist(), list[int](), 0.0
        passes = 2.0 + 2 * self.reads_pairs
        while left := order[: self.checks - len(checked)]:
            some = left[: AT_ONCE if checked else self.top]
            values_EN[:, some] = rises(subject, examples, replacement, some)
            checked += some
            passes += 1 + self.reads_pairs + len(some)
            order, sure = self.others(guess_N, sizes_N, values_EN.mean(dim=0), checked)
            if sure >= self.enough:
                break
        exact_N = torch.zeros(len(guess_N), dtype=torch.bool)
        exact_N[checked] = True
        scores = Scores.mean_over_examples(values_EN, passes, 2)
        return replace(scores, columns={"exact": exact_N, "sure": sure})

    def others(
        self, guess_N: Tensor, sizes_N: Tensor, exact_N: Tensor, checked: Sequence[int]
    ) -> tuple[list[int], float]:
        """Return the heads that were not checked, in the order in which they may belong to the top, and the probability
        that none of them does. `exact_N` need not be exact for them."""
        others = sorted(set(range(len(guess_N))) - {*checked})
        if not others or len(checked) < self.top:
            return others, float(not others)
        mine = list(checked)
        missed, parts = ((x[mine].square().sum()).sqrt() for x in (exact_N - guess_N, sizes_N))
        if missed > 0 and parts == 0:  # nothing is known of what estimates miss
            return sorted(others, key=lambda n: -guess_N[n]), 0.0
        spread_N = sizes_N[others] * (missed / parts if missed > 0 else 0.0)
        limit = exact_N[mine].sort(descending=True).values[self.top - 1]
        gap_N = limit - guess_N[others]
        apart = torch.where(spread_N > 0, gap_N / spread_N, torch.where(gap_N >= 0, torch.inf, -torch.inf))
        return [others[n] for n in apart.argsort().tolist()], float(torch.special.log_ndtr(apart).sum().exp())
