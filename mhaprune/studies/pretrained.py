"""A pretrained model with its examples, as an option of the group `model`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from mhaprune.settings.options import option_name
from mhaprune.settings.ranges import Checked, Ge
from mhaprune.studies.source import Objective, PretrainedModel, PretrainedSource
from mhaprune.tasks.base import SplitSize

BATCH = 32
"""Number of texts that are filled up to the same length, and of examples in a batch."""


@dataclass(frozen=True)
class Pretrained(Checked, ABC):
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
    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        """Read the model and its examples. Raises ValueError, one line, for what cannot be had."""

    @property
    def title(self) -> str:
        """The name in titles."""
        return option_name(self)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of texts of each split."""
        sizes = {"score": self.score, "choose": self.choose, "report": self.report}
        return sizes | ({"train": self.train} if self.train else {})

    def source(
        self, *, data: str | None, objective: str | None, seed: int, device: str, num_threads: int, cache: str
    ) -> PretrainedSource:
        read = partial(self.read, data, objective, cache)
        return PretrainedSource(self.title, read, seed, device, num_threads, cache)


def batched(rows: Sequence[Any]) -> list[Sequence[Any]]:
    """The rows in batches."""
    return [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]


def chosen(objective: str | None, known: Mapping[str, Objective], whose: str) -> tuple[str, Objective]:
    """The objective of that name; without a name the first one. Raises ValueError for a name that is not known."""
    name = objective or next(iter(known))
    if name not in known:
        raise ValueError(f"objective={name}: {whose} is judged by {' or '.join(known)}")
    return name, known[name]
