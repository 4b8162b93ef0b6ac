"""What every model that others made promises as an option of the group `model`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from mhaprune.pretrained.borrowed import Borrowed
from mhaprune.pretrained.material import Material
from mhaprune.settings.options import option_name
from mhaprune.settings.ranges import Ge
from mhaprune.studies.study import ModelOfOthers
from mhaprune.tasks.base import SplitSize


@dataclass(frozen=True)
class Pretrained(ModelOfOthers):
    """A model that is trained already, with examples to study it on."""

    score: SplitSize = 256
    """Number of texts that heads are scored on."""
    choose: SplitSize = 256
    """Number of texts that choices are made on."""
    report: SplitSize = 256
    """Number of texts that results are reported on."""
    train: Annotated[int, Ge(0)] = 0
    """Number of texts that a recovery learns from: fine-tuning reads all, a refit the first. 0 takes those that heads
    are scored on; they are few, and fine-tuning soon knows them by heart."""
    max_length: Annotated[int, Ge(1)] = 128
    """The largest number of tokens of a text; what is beyond is cut off."""
    save: bool = False
    """Whether `experiment=prune` saves the pruned models, each as a folder that `mhaprune.load` reads."""

    @abstractmethod
    def material(self, data: str | None, objective: str | None, cache: str) -> Material:
        """Read the model and its examples. Raises ValueError, one line, for what cannot be had."""

    @property
    def title(self) -> str:
        """What titles call it."""
        return option_name(self)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of texts of each split."""
        sizes = {"score": self.score, "choose": self.choose, "report": self.report}
        return sizes | ({"train": self.train} if self.train else {})

    def source(
        self, *, data: str | None, objective: str | None, seed: int, device: str, num_threads: int, cache: str
    ) -> Borrowed:
        read = partial(self.material, data, objective, cache)
        return Borrowed(self.title, read, seed, device, num_threads, cache)
