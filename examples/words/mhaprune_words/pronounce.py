"""Pronounce English words: real data, from gruut's lexicon of words, phonemes and alignments (MIT licence)."""

import importlib.util
import sqlite3
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

from mhaprune.data import Splits
from mhaprune.lab.tasks.base import Pair, SplitSize, Task
from mhaprune.lab.tasks.sequences import Examples, Vocabulary
from mhaprune.settings.ranges import Ge

SILENT = "_"
"""The sound of letters that stand for no phoneme."""
STRESS = str.maketrans("", "", "ˈˌ")
"""The marks of stress, which are left out."""
RARE = 30
"""A spelling is rare if fewer words of the lexicon have it."""
LONGER, RARELY_SPELT = "longer words", "rare spellings"
"""The names of the shifts."""


class Entry(NamedTuple):
    """A word of the lexicon."""

    phonemes: tuple[str, ...]
    """Its first pronunciation, without stress."""
    spellings: tuple[str, ...]
    """Its alignment, part by part, as the lexicon writes it: `p|h}f`, and `e}_` for a silent letter. Empty if the
    lexicon aligns another pronunciation."""


@dataclass(frozen=True)
class Pronounce(Task):
    """phone -> f oʊ n. The words are put into order by a hash and cut into splits, which are not those of any published
    benchmark: error rates cannot be compared with published ones.

    The lexicon aligns letters with phonemes, as a program does it, not by hand. Words that are too long, or that have a
    rare spelling such as mh for v, are in no split. They are the two shifts of the task.
    """

    learnt: ClassVar[float] = 0.6

    valid: SplitSize = 1000
    """Number of examples that are measured during training."""
    score: SplitSize = 1000
    """Number of examples that heads are scored on."""
    choose: SplitSize = 1000
    """Number of examples that choices are made on."""
    report: SplitSize = 1000
    """Number of examples that results are reported on."""
    train: Annotated[int | None, Ge(1)] = None
    """Largest number of words to train on. None means all that are in no other split."""
    max_letters: Annotated[int, Ge(1)] = 14
    """Number of letters, and of phonemes, of the longest words that are learnt."""

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary((*string.ascii_lowercase, *phonemes()))

    def splits(self) -> Splits[Examples]:
        words = [word for word in in_order(self.seed) if self._short(word) and word not in rarely_spelt()]
        if sum(self.held_out.values()) >= len(words):
            raise ValueError(f"report={self.report}: the splits need more than the {len(words)} words there are")
        parts, start = dict[str, list[str]](), 0
        for name, size in self.held_out.items():
            parts[name], start = words[start : start + size], start + size
        parts["train"] = words[start:][: self.train]
        return Splits(**{name: self.encode([self._pair(word) for word in part]) for name, part in parts.items()})

    def shifts(self) -> dict[str, Examples]:
        words_of: dict[str, list[str]] = {name: [] for name in (LONGER, RARELY_SPELT)}
        for word in in_order(self.seed):
            if not self._short(word):
                words_of[LONGER].append(word)
            elif word in rarely_spelt():
                words_of[RARELY_SPELT].append(word)
        few = {name: words[: self.report] for name, words in words_of.items() if words}
        return {name: self.encode([self._pair(word) for word in words]) for name, words in few.items()}

    def aligned(self, source: Sequence[int], target: Sequence[int]) -> list[range]:
        entry = lexicon().get("".join(self.vocabulary.decode(source)))
        places, start = list[range](), 0
        for part in () if entry is None else entry.spellings:
            written, _, said = part.partition("}")
            end = start + len(written.split("|"))
            places += [range(start, end)] * (0 if said == SILENT else len(said.split("|")))
            start = end
        return places

    def symbols(self, text: str) -> list[str]:
        """Split a word into its letters."""
        return list("".join(text.split()))

    def answer(self, source: Sequence[str]) -> Sequence[str] | None:
        """Return the phonemes in the lexicon; None for words that are not in it."""
        entry = lexicon().get("".join(source))
        return None if entry is None else entry.phonemes

    def show(self, source: Sequence[int], target: Sequence[int]) -> str:
        decode = self.vocabulary.decode
        return f"{''.join(decode(source))} -> {' '.join(decode(target))}"

    def group(self, source: Sequence[int]) -> str:
        """Return the number of letters, as the group of the example."""
        return f"{len(self.vocabulary.decode(source))} letters"

    def _pair(self, word: str) -> Pair:
        return list(word), lexicon()[word].phonemes

    def _short(self, word: str) -> bool:
        return max(len(word), len(lexicon()[word].phonemes)) <= self.max_letters


@lru_cache(maxsize=1)
def lexicon() -> Mapping[str, Entry]:
    """Return the words of the letters a to z. Read once in a process."""
    found = importlib.util.find_spec("gruut_lang_en")  # without importing it
    if found is None or not found.submodule_search_locations:
        raise ValueError("task=pronounce: needs gruut-lang-en: pip install 'mhaprune[words]'")
    file = Path(found.submodule_search_locations[0]) / "lexicon.db"
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as database:
        rows = database.execute("SELECT word, phonemes FROM word_phonemes ORDER BY pron_order DESC, id DESC")
        pronounced = {word: tuple(said.translate(STRESS).split()) for word, said in rows}  # the first one is kept
        aligned = dict(database.execute("SELECT word, alignment FROM g2p_alignments ORDER BY id DESC"))
    database.close()
    return {
        word: Entry(said, _spellings(aligned.get(word, ""), said))
        for word, said in sorted(pronounced.items())
        if said and word.isascii() and word.isalpha() and word.islower()
    }


@lru_cache(maxsize=2)
def in_order(seed: int) -> Sequence[str]:
    """Return the words of the lexicon in the order of a hash."""
    return sorted(lexicon(), key=lambda word: sha256(f"{seed} {word}".encode()).digest())


def _spellings(alignment: str, said: Sequence[str]) -> tuple[str, ...]:
    """Return the parts of an alignment; none if it is of another pronunciation."""
    parts = tuple(alignment.translate(STRESS).split())
    sounds = [sound for part in parts if (sound := part.partition("}")[2]) != SILENT]
    return parts if "|".join(sounds) == "|".join(said) else ()


@lru_cache(maxsize=1)
def rarely_spelt() -> frozenset[str]:
    """Return the words with a spelling that is rare in the lexicon."""
    words = Counter(spelling for entry in lexicon().values() for spelling in set(entry.spellings))
    return frozenset(word for word, entry in lexicon().items() if any(words[each] < RARE for each in entry.spellings))


@lru_cache(maxsize=1)
def phonemes() -> tuple[str, ...]:
    """Return the phonemes of the lexicon that are no letters too, sorted."""
    found = {sound for entry in lexicon().values() for sound in entry.phonemes}
    return tuple(sorted(found - set(string.ascii_lowercase)))
