"""What every task promises, and the part that tasks on generated sequences share."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from mhaprune.data import Examples, Vocabulary, pad

Pair = tuple[Sequence[str], Sequence[str]]


@dataclass(frozen=True)
class Splits:
    """Five disjoint splits: heads are scored on `score`, choices made on `choose`, numbers reported on `report`."""

    train: Examples
    valid: Examples
    score: Examples
    choose: Examples
    report: Examples

    def items(self) -> Iterator[tuple[str, Examples]]:
        return ((f.name, getattr(self, f.name)) for f in fields(self))


@dataclass(frozen=True)
class Task(ABC):
    """A sequence-to-sequence task with fixed splits.

    `seed` fixes the examples and is not the seed of the run, so that models of different seeds are scored and
    reported on the same examples. `score`, `choose` and `report` are numbers of examples; `valid` is what training
    watches.
    """

    seed: int = 0
    valid: int = 512
    score: int = 512
    choose: int = 512
    report: int = 512

    def __post_init__(self) -> None:
        for name in ("valid", "score", "choose", "report"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name}={getattr(self, name)}: must be 2 or more examples")

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary: ...

    @abstractmethod
    def splits(self) -> Splits:
        """The examples, the same ones at every call."""

    @abstractmethod
    def symbols(self, text: str) -> list[str]:
        """The symbols of a source as a person types it, whether they are in the vocabulary or not."""

    @abstractmethod
    def answer(self, source: Sequence[str]) -> Sequence[str] | None:
        """The target of a source; None where the task does not know it."""

    def read(self, text: str) -> list[str]:
        """The source that a person typed; raises ValueError, one line, for what is empty or not in the vocabulary."""
        source, known = self.symbols(text), self.vocabulary.symbols
        allowed = f"allowed are {' '.join(known)}"
        if not source:
            raise ValueError(f"example={text!r}: is empty, {allowed}")
        if unknown := [symbol for symbol in dict.fromkeys(source) if symbol not in known]:
            verb = "is" if len(unknown) == 1 else "are"
            raise ValueError(f"example={text!r}: {', '.join(unknown)} {verb} not in the vocabulary, {allowed}")
        return source

    def show(self, source: Sequence[int], target: Sequence[int]) -> str:
        """One example as a person would write it."""
        decode = self.vocabulary.decode
        return f"{' '.join(decode(source))} -> {' '.join(decode(target))}"

    def group(self, source: Sequence[int]) -> str:
        """What kind of example it is, for results kind by kind; here how many symbols its source has."""
        return f"{len(self.vocabulary.decode(source))} symbols"

    def encode(self, pairs: Sequence[Pair]) -> Examples:
        encode = self.vocabulary.encode
        return Examples(pad([encode(source) for source, _ in pairs]), pad([encode(target) for _, target in pairs]))

    @property
    def held_out(self) -> dict[str, int]:
        """How many examples each split but `train` takes."""
        return {name: getattr(self, name) for name in ("valid", "score", "choose", "report")}


@dataclass(frozen=True)
class SequenceTask(Task):
    """A task on generated sequences: `min_length` to `max_length` symbols out of `num_symbols`, no sequence twice."""

    num_symbols: int = 10
    min_length: int = 2
    max_length: int = 10
    train: int = 20000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.num_symbols <= len(ALPHABET):
            raise ValueError(f"num_symbols={self.num_symbols}: must be from 2 to {len(ALPHABET)}")
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(f"min_length={self.min_length}: must be from 1 to max_length={self.max_length}")
        if self.train < 1:
            raise ValueError(f"train={self.train}: must be 1 or more examples")
        needed = self.train + sum(self.held_out.values())
        possible = sum(self.num_symbols**length for length in range(self.min_length, self.max_length + 1))
        if needed > possible // 2:
            raise ValueError(
                f"train={self.train}: all splits together need {needed} distinct sequences,"
                f" at most {possible // 2} are drawn from {self.num_symbols} symbols"
                f" and lengths {self.min_length} to {self.max_length}"
            )

    @abstractmethod
    def transform(self, source: Sequence[int]) -> Sequence[int]:
        """The target of a source, both as indices into the symbols."""

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(tuple(ALPHABET[: self.num_symbols]))

    def symbols(self, text: str) -> list[str]:
        """3 1 2; without blanks, 312, every character is a symbol."""
        words = text.split()
        return list(words[0]) if len(words) == 1 else words

    def answer(self, source: Sequence[str]) -> Sequence[str]:
        return [ALPHABET[i] for i in self.transform([ALPHABET.index(symbol) for symbol in source])]

    def splits(self) -> Splits:
        sizes = self.held_out | {"train": self.train}
        draw = random.Random(self.seed)
        sources: dict[tuple[int, ...], None] = {}
        while len(sources) < sum(sizes.values()):
            length = draw.randint(self.min_length, self.max_length)
            sources[tuple(draw.choices(range(self.num_symbols), k=length))] = None
        order = list(sources)
        # Short sequences run out early, so that late draws are longer: without this the splits would differ in kind.
        draw.shuffle(order)
        rest = iter(order)
        return Splits(**{name: self.encode([self._pair(next(rest)) for _ in range(n)]) for name, n in sizes.items()})

    def _pair(self, indices: Sequence[int]) -> Pair:
        source = [ALPHABET[i] for i in indices]
        return source, self.answer(source)


ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
