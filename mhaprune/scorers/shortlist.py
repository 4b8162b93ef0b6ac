"""Score: exact where it decides, estimated elsewhere.

Dimensions: S = steps, E = examples, N = all heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.replacing import corrupted, rises, slopes
from mhaprune.settings.ranges import Ge, Within
from mhaprune.subject import Subject

AT_ONCE = 8
"""Number of heads that are measured before it is asked again how sure the top is."""


@dataclass(frozen=True)
class Shortlist(Scorer):
    """The exact rise of the loss for heads that may be among the `top`, and an estimate for all others.

    The estimate is a first-order one of `patching`, or of `ablation` if `replace` is "zero": the derivative with all
    heads as they are, or its mean over the `steps` of `attribution_patching`, whichever is larger. The first misses
    heads that others stand in for, the second those that few others help. Then heads are measured alone, those of the
    largest estimates first, until the top is known with the probability `enough`, or `checks` are made.

    The table says which scores are `exact`, and how `sure` it is that the top is among them: as if what the estimates
    missed were normal, with the spread that it had for the heads that were measured last.
    """

    family: ClassVar[str] = "patching"

    replace: Literal["corrupt", "zero"] = "corrupt"
    """The replacement for the output of a head: its output on the corrupt counterpart, or zeros."""
    top: Annotated[int, Ge(1)] = 10
    """Number of the most important heads that are asked for."""
    checks: Annotated[int, Ge(2)] = 32
    """The largest number of heads that are measured."""
    steps: Annotated[int, Ge(1)] = 2
    """Number of points at which derivatives are taken."""
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
        slopes_SEN = slopes(subject, examples, replacement, self.steps)
        ways = slopes_SEN[0], slopes_SEN.mean(dim=0)
        larger_N = ways[1].mean(dim=0) > ways[0].mean(dim=0)
        values_EN = torch.where(larger_N, ways[1], ways[0])
        guess_N = values_EN.mean(dim=0)
        order, checked, sure, passes = guess_N.argsort(descending=True).tolist(), list[int](), 0.0, 1.0 + self.steps
        while left := order[len(checked) : self.checks]:
            some = left[: AT_ONCE if checked else self.top]
            values_EN[:, some] = rises(subject, examples, replacement, some)
            checked += some
            passes += 1 + self.reads_pairs + len(some)
            sure = self.known(guess_N, values_EN.mean(dim=0), checked)
            if sure >= self.enough:
                break
        exact_N = torch.zeros(len(order), dtype=torch.bool)
        exact_N[checked] = True
        scores = Scores.mean_over_examples(values_EN, passes, self.steps)
        return replace(scores, columns={"exact": exact_N, "sure": sure})

    def known(self, guess_N: Tensor, exact_N: Tensor, checked: Sequence[int]) -> float:
        """Return the probability that no other head belongs to the top of those that were checked. `exact_N` need not
        be exact for others."""
        others = sorted(set(range(len(guess_N))) - {*checked})
        if not others or len(checked) < self.top:
            return float(not others)
        last = list(checked)[len(checked) // 2 :]
        spread = (exact_N[last] - guess_N[last]).square().mean().sqrt().clamp(min=torch.finfo(torch.double).tiny)
        limit = exact_N[list(checked)].sort(descending=True).values[self.top - 1]
        return float(torch.special.log_ndtr((limit - guess_N[others]) / spread).sum().exp())
