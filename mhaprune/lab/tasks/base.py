"""The base of tasks, and of tasks on generated sequences."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.lab.tasks.sequences import Examples, Vocabulary, pad
from mhaprune.settings.ranges import Checked, Ge, Within

Aligned = Callable[[Any], Tensor]
"""A function that takes a batch and returns a mask (B, T, S): True where a source symbol stands for a target symbol."""
Pair = tuple[Sequence[str], Sequence[str]]
SplitSize = Annotated[int, Ge(2)]
"""Number of examples of a split that is not trained on; at least 2, for a standard error."""


@dataclass(frozen=True)
class Task(Checked, ABC):
    """A sequence-to-sequence task with fixed splits (see `Splits` for what each is for)."""

    learnt: ClassVar[float] = 0.99
    """The lowest exact match at which a model counts as having learnt the task."""

    seed: Annotated[int, Ge(0)] = 0
    """The seed of the examples. It is not the seed of the run: models of different seeds share the same examples."""
    valid: SplitSize = 512
    """Number of examples that are measured during training."""
    score: SplitSize = 512
    """Number of examples that heads are scored on."""
    choose: SplitSize = 512
    """Number of examples that choices are made on."""
    report: SplitSize = 512
    """Number of examples that results are reported on."""

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary: ...

    @abstractmethod
    def splits(self) -> Splits[Examples]:
        """Return the examples of all splits. Every call returns equal examples."""

    @abstractmethod
    def symbols(self, text: str) -> list[str]:
        """Split a source, as a person types it, into symbols. The symbols need not be in the vocabulary."""

    @abstractmethod
    def answer(self, source: Sequence[str]) -> Sequence[str] | None:
        """Return the target of a source; None if the task does not know it."""

    def shifts(self) -> dict[str, Examples]:
        """Return examples of another kind than those that are learnt, by the name of the kind, at most `report` of
        each. Pruned models are measured on them too. None by default."""
        return {}

    def aligned(self, source: Sequence[int], target: Sequence[int]) -> Sequence[Collection[int]]:
        """Return, for each symbol of the target, the positions in the source that it stands for; nothing, as by
        default, if they are not known."""
        return ()

    def alignment(self, examples: Examples) -> Aligned | None:
        """Return what `aligned` knows as a function of batches; None if it knows nothing of these examples."""

        def aligned(batch: Any) -> Tensor:
            places = torch.zeros(*batch.target.shape, batch.source.shape[1], dtype=torch.bool)
            for i, (source, target) in enumerate(zip(batch.source.tolist(), batch.target.tolist(), strict=True)):
                for t, positions in enumerate(self.aligned(source, target)):
                    places[i, t, list(positions)] = True
            return places.to(batch.device)

        return aligned if aligned(examples[:128]).any() else None

    def read(self, text: str) -> list[str]:
        """Return the symbols of a source that a person typed. Raises ValueError, one line, if it is empty or not in the
        vocabulary."""
        source, known = self.symbols(text), self.vocabulary.symbols
        allowed = f"allowed are {' '.join(known)}"
        if not source:
            raise ValueError(f"example={text!r}: is empty, {allowed}")
        if unknown := [symbol for symbol in dict.fromkeys(source) if symbol not in known]:
            verb = "is" if len(unknown) == 1 else "are"
            raise ValueError(f"example={text!r}: {', '.join(unknown)} {verb} not in the vocabulary, {allowed}")
        return source

    def show(self, source: Sequence[int], target: Sequence[int]) -> str:
        """Return one example as a person would write it."""
        decode = self.vocabulary.decode
        return f"{' '.join(decode(source))} -> {' '.join(decode(target))}"

    def group(self, source: Sequence[int]) -> str:
        """Return the kind of an example, for results kind by kind; here the number of symbols of its source."""
        return f"{len(self.vocabulary.decode(source))} symbols"

    def encode(self, pairs: Sequence[Pair]) -> Examples:
        encode = self.vocabulary.encode
        return Examples(pad([encode(source) for source, _ in pairs]), pad([encode(target) for _, target in pairs]))

    def bytes_of_examples(self) -> int:
        """Estimate the memory that the splits take while they are made; 0 for a task that reads its examples."""
        return 0

    @property
    def held_out(self) -> dict[str, int]:
        """The number of examples of each split except `train`."""
        return {name: getattr(self, name) for name in ("valid", "score", "choose", "report")}


@dataclass(frozen=True)
class SequenceTask(Task):
    """A task on randomly drawn sequences, all of them different."""

    num_symbols: Annotated[int, Within(2, len(ALPHABET))] = 10
    """Number of different symbols: the digits, then the letters."""
    min_length: Annotated[int, Ge(1)] = 2
    """Number of symbols of the shortest sequences."""
    max_length: Annotated[int, Within(1, 4096)] = 10
    """Number of symbols of the longest sequences."""
    train: Annotated[int, Ge(1)] = 20000
    """Number of examples to train on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_length > self.max_length:
            raise ValueError(f"min_length={self.min_length}: must be at most max_length={self.max_length}")
        needed = self.train + sum(self.held_out.values())
        possible = sum(self.num_symbols**length for length in range(self.min_length, self.max_length + 1))
        if needed > possible // 2:
            raise ValueError(
                f"train={self.train}: all splits together need {needed} distinct sequences,"
                f" at most {possible // 2} are drawn from {self.num_symbols} symbols"
                f" and lengths {self.min_length} to {self.max_length}"
            )

    def bytes_of_examples(self) -> int:
        # Two tensors of int64, and the tuples and lists of Python that they are made from.
        return (self.train + sum(self.held_out.values())) * (
            2 * 8 * (self.max_length + 1) + 2 * 60 * self.max_length + 400
        )

    @abstractmethod
    def transform(self, source: Sequence[int]) -> Sequence[int]:
        """Return the target of a source, both as indices into the symbols."""

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(tuple(ALPHABET[: self.num_symbols]))

    def symbols(self, text: str) -> list[str]:
        """Split a text at blanks: `3 1 2`. In a text without blanks, such as `312`, every character is a symbol."""
        words = text.split()
        return list(words[0]) if len(words) == 1 else words

    def answer(self, source: Sequence[str]) -> Sequence[str]:
        return [ALPHABET[i] for i in self.transform([ALPHABET.index(symbol) for symbol in source])]

    def splits(self) -> Splits[Examples]:
        sizes = self.held_out | {"train": self.train}
        rest = iter(self._drawn())
        return Splits(**{name: self.encode([self._pair(next(rest)) for _ in range(n)]) for name, n in sizes.items()})

    def shifts(self) -> dict[str, Examples]:
        """Return sequences that are one symbol longer than the longest, and longest sequences of two different symbols
        only. What is in a split is left out; a task of two symbols has only the longer sequences."""
        return {name: self.encode(list(map(self._pair, sources))) for name, sources in self._measured().items()}

    def _drawn(self) -> list[tuple[int, ...]]:
        """Return the sources of all splits, in random order."""
        draw, count = random.Random(self.seed), self.train + sum(self.held_out.values())
        sources: dict[tuple[int, ...], None] = {}
        while len(sources) < count:
            length = draw.randint(self.min_length, self.max_length)
            sources[tuple(draw.choices(range(self.num_symbols), k=length))] = None
        order = list(sources)
        # Short sequences run out early, so that late draws are longer: without this the splits would differ in kind.
        draw.shuffle(order)
        return order

    def _measured(self) -> dict[str, list[list[int]]]:
        """Return the sources of each shift, at most `report`, by its name."""
        draw, count, symbols = random.Random(self.seed + 1), self.report, range(self.num_symbols)
        kinds = {f"{self.max_length + 1} symbols": [draw.choices(symbols, k=self.max_length + 1) for _ in range(count)]}
        if self.num_symbols > 2:
            usual = set(self._drawn())
            repeated = [draw.choices(draw.sample(symbols, 2), k=self.max_length) for _ in range(count)]
            kinds["repeated symbols"] = [source for source in repeated if tuple(source) not in usual]
        return {name: sources for name, sources in kinds.items() if sources}

    def _pair(self, indices: Sequence[int]) -> Pair:
        source = [ALPHABET[i] for i in indices]
        return source, self.answer(source)


ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
