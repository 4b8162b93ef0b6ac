"""Examples in splits and batches, of any model.

Dimensions: E = examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, NoReturn, Self, TypeVar

import torch
from torch import Tensor

from mhaprune.moved import names_in

if not TYPE_CHECKING:  # else no name of this module would be checked
    __getattr__ = names_in(
        "mhaprune.lab.tasks.sequences",
        *("Examples", "Vocabulary", "pad", "shift_right", "PAD", "BOS", "EOS", "SPECIAL"),
    )

FEW, FEW_TOKENS = 16, 512
"""Number of examples, and of their tokens, that are enough for a proof or a count of operations."""


class Data(ABC):
    """Examples that a model can be measured on. A batch of them has the same type."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: slice | Tensor) -> Self:
        """Return the examples at these positions, in the order of the index."""

    @abstractmethod
    def lengths(self) -> Tensor:
        """(E,): the number of tokens of each example, padding excluded."""

    @abstractmethod
    def by_length(self) -> Tensor:
        """Return the positions (E,) of the examples, sorted so that neighbours have similar lengths. Then batches hold
        little padding."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors that the examples hold, by name."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    def by_kind(self) -> dict[str, Tensor]:
        """Return the positions of the examples of each kind, by the name of the kind; empty if none are told apart."""
        return {}

    def evenly(self, number: int) -> Self:
        """Return the first examples, at most this number; of kinds that are told apart, equally many of each, as far as
        each has as many."""
        kinds = self.by_kind().values()
        if not kinds or number >= len(self):
            return self[:number]
        counts = range(max(map(len, kinds)), -1, -1)
        fits = next(n for n in counts if sum(min(n, len(rows)) for rows in kinds) <= number)
        return self[torch.cat([rows[: max(1, fits)] for rows in kinds])[: max(1, number)]]

    def counterpart(self) -> Self:
        """Return a corrupt counterpart of every example, of the same length: the thing asked about is missing. Raises
        ValueError for examples that have none."""
        raise ValueError("needs a corrupt counterpart of every example, which corrupt=batches gives")

    def __iter__(self) -> NoReturn:
        """Raise TypeError: examples are not iterable. Python would otherwise try the items 0, 1, 2."""
        raise TypeError("examples are read in batches: for batch in examples.batches(128)")

    def first(self, number: int) -> Self:
        """Return the first examples that can be computed together, at most this number."""
        return self[:number]

    def few(self) -> Self:
        """Return the first examples: at most `FEW`, with at most `FEW_TOKENS` tokens, but at least one example."""
        first = self.first(self.rows(FEW))
        within = int((first.lengths().cumsum(dim=0) <= FEW_TOKENS).sum())
        return first[: max(1, within)]

    def batches(self, batch_size: int) -> Iterator[Self]:
        """Yield all examples in their order, at most `batch_size` at once."""
        for at in self.passes(torch.arange(len(self)), batch_size):
            yield self[int(at[0]) : int(at[-1]) + 1]

    def passes(self, order: Tensor, wanted: int) -> Iterator[Tensor]:
        """Split positions (E,) into those of one pass each: at most `wanted`, and only examples that can be computed
        together."""
        yield from order.split(self.rows(wanted))

    def rows(self, wanted: int) -> int:
        """Return how many examples to compute at once: `wanted`, or fewer if the data sets a limit."""
        return wanted

    def shuffled_batches(
        self, batch_size: int, order: torch.Generator, sorted_batches: int = 1, skip: int = 0
    ) -> Iterator[Self]:
        """Yield batches without end: every epoch is a new permutation. The first `skip` batches are dropped.

        The examples of `sorted_batches` batches are drawn together, sorted by length and cut into batches, which come
        in random order. 1 sorts nothing.
        """
        lengths = self.lengths().cpu()
        while True:
            for drawn in torch.randperm(len(self), generator=order).split(batch_size * sorted_batches):
                batches = drawn.split(batch_size)
                if sorted_batches > 1:
                    batches = drawn[lengths[drawn].argsort(stable=True)].split(batch_size)
                    batches = [batches[i] for i in torch.randperm(len(batches), generator=order)]
                for index in batches:
                    if skip > 0:
                        skip -= 1
                    else:
                        yield self[index.to(self.device)]


PROOF = "proof"
"""The name of the examples that removals are proved on, taken from the other splits."""
SPLITS = ("train", "valid", "score", "choose", "report", PROOF)
"""The names of the splits. Any other name is one of a shift: see `Splits.shifts`."""
Part = TypeVar("Part", bound=Data, covariant=True)


class Splits(Generic[Part]):
    """Disjoint lists of examples by name, so that no number is reported on examples that a choice was made on.

    Raises ValueError if a split is needed but was not given.
    """

    def __init__(self, **given: Part) -> None:
        self.given = given

    def __getitem__(self, name: str) -> Part:
        if name not in self.given:
            raise ValueError(f"{name}: no batches were given, which {name}=batches does")
        return self.given[name]

    def items(self) -> Iterable[tuple[str, Part]]:
        return ((name, part) for name, part in self.given.items() if name != PROOF)

    @property
    def score(self) -> Part:
        """The examples that heads are scored on."""
        return self["score"]

    @property
    def choose(self) -> Part:
        """The examples that decide between pruned models."""
        return self["choose"]

    @property
    def report(self) -> Part:
        """The examples that the numbers in tables and figures are measured on."""
        return self["report"]

    @property
    def proof(self) -> Part:
        """The examples that proofs of a removal read. By default a few of the report split."""
        return self[PROOF] if PROOF in self.given else self.report.few()

    @property
    def shifts(self) -> dict[str, Part]:
        """Examples of other kinds, by the name of the kind. Nothing is learnt or chosen on them."""
        return {name: part for name, part in self.given.items() if name not in SPLITS}

    @property
    def alike(self) -> bool:
        """True if nothing is reported on examples of another kind than those that a model is fitted to."""
        reported = {*self["report"].by_kind()} if "report" in self.given else set()
        return not self.shifts and not reported - {*self.train.by_kind()}

    @property
    def train(self) -> Part:
        """The examples that a training learns from; a refit reads their inputs, but no label. Nothing is chosen or
        reported on them. If the user gives none, the score split is used."""
        return self["train" if "train" in self.given else "score"]

    @property
    def valid(self) -> Part:
        """The examples that the quality is measured on during training. If the user gives none, the choose split is
        used."""
        return self["valid" if "valid" in self.given else "choose"]
