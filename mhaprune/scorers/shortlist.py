"""Score: exact where it decides, estimated elsewhere.

Dimensions: E = examples, N = all heads, W = ways to estimate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import all_open, gate_gradients, token_gradients
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.replacing import corrupted, rises
from mhaprune.settings.ranges import Ge, Within
from mhaprune.subject import Subject

AT_ONCE = 16
"""Number of heads that are measured before it is asked again how sure the top is."""
POINTS = (0.5, 0.75)
"""How far all heads are open at the points, beside 1, at which derivatives are taken."""


@dataclass(frozen=True)
class Shortlist(Scorer):
    """The exact rise of the loss for heads that may be among the `top`, and an estimate for all others.

    The estimate is a first-order one of `patching`, or of `ablation` if `replace` is "zero": the derivative with all
    heads as they are, its mean with that half of the way to their replacements, or the one a quarter of the way,
    whichever is largest. The first misses heads that are saturated, the others those that need others.

    What an estimate misses is in proportion to the parts that cancel in it: the sum of the absolute derivatives by
    token. So heads are measured in the order of the estimate plus this sum. What is missed is taken to spread in the
    proportion that the measured heads show, as Student's t with three degrees of freedom: few heads are missed by far.
    This gives a probability that the top is among those that were measured, which tends to be too low. The search ends
    if it is `enough`, or after `checks`. The table says which scores are `exact`, and this probability, `sure`.
    """

    family: ClassVar[str] = "patching"
    signed: ClassVar[bool] = True

    replace: Literal["corrupt", "zero"] = "corrupt"
    """The replacement for the output of a head: its output on the corrupt counterpart, or zeros."""
    top: Annotated[int, Ge(1)] = 10
    """Number of the most important heads that are asked for."""
    checks: Annotated[int, Ge(1)] = 48
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
        points = all_open(subject, len(POINTS)) * torch.tensor(POINTS)[:, None].to(subject.device)
        half_EN, quarter_EN = gate_gradients(subject, examples, points, replacement=replacement)
        ways_WEN = -torch.stack([slopes_EN, (slopes_EN + half_EN) / 2, quarter_EN])
        values_EN, checked, sure = self.search(ways_WEN, sizes_EN, partial(rises, subject, examples, replacement))
        passes = 1.0 + len(POINTS) + self.reads_pairs + len(checked) + 1 + -(-(len(checked) - self.top) // AT_ONCE)
        exact_N = torch.zeros(len(subject.grid), dtype=torch.bool)
        exact_N[checked] = True
        scores = Scores.mean_over_examples(values_EN, passes, 1 + len(POINTS))
        return replace(scores, columns={"exact": exact_N, "sure": sure})

    def search(
        self, ways_WEN: Tensor, sizes_EN: Tensor, measure: Callable[[list[int]], Tensor]
    ) -> tuple[Tensor, list[int], float]:
        """Return scores (E, N), the heads that were measured, and how sure the top is; `measure` returns (E, heads)."""
        largest_N = ways_WEN.mean(dim=1).argmax(dim=0)
        values_EN = ways_WEN.gather(0, largest_N.expand(1, ways_WEN.shape[1], -1))[0]
        guess_N, sizes_N = values_EN.mean(dim=0), sizes_EN.mean(dim=0)
        order, checked, sure = (guess_N + sizes_N).argsort(descending=True).tolist(), list[int](), 0.0
        while some := order[len(checked) : self.checks][: AT_ONCE if checked else self.top]:
            values_EN[:, some] = measure(some)
            checked += some
            if (sure := self.sure(guess_N, sizes_N, values_EN.mean(dim=0), checked)) >= self.enough:
                break
        return values_EN, checked, sure

    def sure(self, guess_N: Tensor, sizes_N: Tensor, exact_N: Tensor, checked: Sequence[int]) -> float:
        """Return the probability that no other head belongs to the top; `exact_N` is read where heads are `checked`."""
        mine, others = list(checked), sorted(set(range(len(guess_N))) - {*checked})
        if not others or len(mine) < self.top:
            return float(not others)
        missed_N = exact_N[mine] - guess_N[mine]
        if bool(((missed_N != 0) & (sizes_N[mine] == 0)).any()):
            return 0.0  # nothing is known of what estimates miss
        shares_N = torch.where(sizes_N[mine] > 0, missed_N / sizes_N[mine], 0.0)
        spread_N = sizes_N[others] * shares_N.square().mean().sqrt()
        gap_N = exact_N[mine].sort(descending=True).values[self.top - 1] - guess_N[others]
        apart = torch.where(spread_N > 0, gap_N / spread_N, torch.where(gap_N >= 0, torch.inf, -torch.inf))
        x = apart / 3**0.5
        below = 0.5 + (torch.where(x.isinf(), 0.0, x / (1 + x.square())) + x.atan()) / torch.pi
        return float(below.log().sum().exp())
