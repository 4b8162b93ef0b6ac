"""Models without some heads and refitted, for a schedule that chooses heads by what is lost after a refit.

Dimensions: N = all heads.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import HeadMask
from mhaprune.measure import measure
from mhaprune.recoveries.refitting import Shown, refit, show
from mhaprune.scorers.refit_error import RefitError
from mhaprune.subject import Refittable, Subject


class Refits:
    """See `schedules.base.Refits`. It counts what it takes."""

    def __init__(self, subject: Refittable, examples: Data) -> None:
        self.subject, self.fitted, self.judged = subject, examples[::2], examples[1::2]
        self.passes = 0.0
        """Forward passes, over one half of the examples each."""

    def without(self, mask: HeadMask) -> Subject:
        shown = self._shown
        self.passes += 1
        return refit(self.subject.without(mask), shown, feed_forward=False)

    def loss(self, left: Subject) -> float:
        self.passes += 1
        with torch.no_grad():
            return float(measure(left, self.judged).loss.double().mean())

    def errors(self, left: Subject) -> Tensor:
        scores = RefitError()(left, self.fitted, 0)
        self.passes += scores.forward_passes
        return scores.values[0]

    @cached_property
    def _shown(self) -> Shown:
        self.passes += 1
        return show(self.subject, self.fitted)
