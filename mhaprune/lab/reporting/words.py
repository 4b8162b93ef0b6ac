"""The meaning of every word, table and column of a report, from `words.yaml`."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from mhaprune.tables import GATE


class Words(NamedTuple):
    """The content of `words.yaml`."""

    words: Mapping[str, str]
    """The meaning of each term."""
    tables: Mapping[str, Mapping[str, Any]]
    """For each table, its meaning as `text` and the `experiments` that write it."""
    columns: Mapping[str, str]
    """The meaning of each column."""
    endings: Mapping[str, str]
    """The meaning of the endings of columns."""

    def column(self, name: str) -> str:
        """Return the meaning of a column of any table; empty for a column that is not known, as of a plug-in."""
        if name.startswith(GATE):
            return f"Gate of the head {name.removeprefix(GATE)}."
        if name in self.columns:
            return self.columns[name]
        base, ending = self._parted(name)
        return f"{self.columns[base]} Here its {self.endings[ending]}." if base in self.columns else ""

    def table(self, name: str) -> str:
        """Return the meaning of a table; empty for a table that is not known."""
        return str(self.tables.get(name, {}).get("text", ""))

    @property
    def anywhere(self) -> re.Pattern[str]:
        """A pattern that finds every term in a text: as a whole word, in any case, also in the plural."""
        return _pattern(tuple(self.words))

    def term(self, found: str) -> str:
        """Return the term that `anywhere` has found as this text."""
        terms = {term.lower(): term for term in self.words}
        return terms.get(found.lower()) or terms[found.lower().removesuffix("s")]

    def used_in(self, text: str) -> dict[str, str]:
        """Return those terms that occur in a text, with their meanings, in the order of the alphabet."""
        used = {self.term(found[0]) for found in self.anywhere.finditer(text)}
        return {term: meaning for term, meaning in self.words.items() if term in used}

    def _parted(self, name: str) -> tuple[str, str]:
        return next(((name.removesuffix(end), end) for end in self.endings if name.endswith(end)), (name, ""))


@cache
def _pattern(terms: tuple[str, ...]) -> re.Pattern[str]:
    some = "|".join(map(re.escape, sorted(terms, key=len, reverse=True)))
    return re.compile(rf"(?<![\w-])(?:{some})s?(?![\w-])", re.IGNORECASE)


@cache
def words() -> Words:
    """Return the meanings, read once."""
    return Words(**yaml.safe_load(files("mhaprune.lab.reporting").joinpath("words.yaml").read_text()))
