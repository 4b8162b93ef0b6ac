"""Inflect English words: real data, from lemminflect's table of lemmas and forms (MIT licence)."""

import csv
import gzip
import importlib.util
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, ClassVar

from mhaprune.data import Splits
from mhaprune.lab.tasks.base import Pair, SplitSize, Task
from mhaprune.lab.tasks.sequences import Examples, Vocabulary
from mhaprune.settings.ranges import Ge

MEANINGS = {
    "noun0": "plural",
    "verb0": "past",
    "verb1": "past participle",
    "verb2": "-ing",
    "verb3": "-s",
    "adj0": "-er",
    "adj1": "-est",
}
"""The form of the word that each tag asks for."""
FORMS = {"noun": ("noun0",), "verb": ("verb0", "verb1", "verb2", "verb3"), "adj": ("adj0", "adj1")}
"""The tags of each part of speech, in the order of the columns in the table. Nouns: plural. Verbs: past, past
participle, -ing, -s. Adjectives: -er, -est."""


@dataclass(frozen=True)
class Inflection(Task):
    """walk verb3 -> walks. The splits share no lemma, so no form of a reported word was seen in training.

    Lemmas and forms consist of the letters a to z. If the table has several forms for one tag of a lemma, the first is
    kept.
    """

    learnt: ClassVar[float] = 0.88

    valid: SplitSize = 1000
    """Number of examples that are measured during training."""
    score: SplitSize = 1000
    """Number of examples that heads are scored on."""
    choose: SplitSize = 1000
    """Number of examples that choices are made on."""
    report: SplitSize = 1000
    """Number of examples that results are reported on."""
    max_letters: Annotated[int, Ge(1)] = 16
    """Number of letters of the longest words that are kept."""

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary((*string.ascii_lowercase, *(tag for tags in FORMS.values() for tag in tags)))

    def splits(self) -> Splits[Examples]:
        pairs = sorted(self._pairs())
        lemmas = [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0])]
        random.Random(self.seed).shuffle(lemmas)
        if sum(self.held_out.values()) >= len(pairs):
            raise ValueError(f"report={self.report}: the splits need more than the {len(pairs)} examples there are")
        parts: dict[str, list[Pair]] = {}
        rest = iter(lemmas)
        for name, size in self.held_out.items():
            part: list[Pair] = []
            while len(part) < size:
                part += [([*lemma, tag], form) for lemma, tag, form in next(rest)]
            parts[name] = part[:size]
        parts["train"] = [([*lemma, tag], form) for group in rest for lemma, tag, form in group]
        return Splits(**{name: self.encode(part) for name, part in parts.items()})

    def symbols(self, text: str) -> list[str]:
        """Split a text such as `walk verb3` into the letters of the lemma and the tag."""
        return [symbol for word in text.split() for symbol in ([word] if word[-1].isdigit() else word)]

    def read(self, text: str) -> list[str]:
        source = super().read(text)
        if len(source) < 2 or [symbol in MEANINGS for symbol in source] != [False] * (len(source) - 1) + [True]:
            tags = ", ".join(f"{tag} ({meaning})" for tag, meaning in MEANINGS.items())
            raise ValueError(f"example={text!r}: must be a lemma and one of {tags}, for example walk verb3")
        return source

    def answer(self, source: Sequence[str]) -> Sequence[str] | None:
        """Return the form in the table; None for words that are not in it."""
        lemma = "".join(source[:-1])
        return next((form for _, tag, form in self._pairs(lemma) if tag == source[-1]), None)

    def show(self, source: Sequence[int], target: Sequence[int]) -> str:
        *lemma, tag = self.vocabulary.decode(source)
        return f"{''.join(lemma)} {tag} -> {''.join(self.vocabulary.decode(target))}"

    def group(self, source: Sequence[int]) -> str:
        """Return the tag of an example, as the group of the example."""
        return self.vocabulary.decode(source)[-1]

    def _pairs(self, of: str | None = None) -> set[tuple[str, str, str]]:
        """Return lemmas, tags and forms; if `of` is a lemma, its own."""
        return {
            (lemma, tag, form)
            for lemma, part_of_speech, *columns in table()
            if of in (None, lemma)
            for tag, forms in zip(FORMS.get(part_of_speech, ()), columns, strict=False)
            if self._plain(lemma) and self._plain(form := forms.split("/")[0])
        }

    def _plain(self, word: str) -> bool:
        return len(word) <= self.max_letters and word.isascii() and word.isalpha() and word.islower()


@lru_cache(maxsize=1)
def table() -> list[list[str]]:
    """Return the rows of the table: lemma, part of speech, forms. Read once in a process."""
    found = importlib.util.find_spec("lemminflect")  # without importing it
    if found is None or not found.submodule_search_locations:
        raise ValueError("task=inflection: needs lemminflect: pip install 'mhaprune[words]'")
    path = Path(found.submodule_search_locations[0]) / "resources" / "infl_lu.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.reader(file))
