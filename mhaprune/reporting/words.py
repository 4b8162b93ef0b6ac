"""The meaning of every word, table and column of a report, from `words.yaml`."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from mhaprune.tables import GATE


class Words(NamedTuple):
    """What is written in `words.yaml`."""

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

    def used_in(self, text: str) -> dict[str, str]:
        """Return those terms that occur in a text, as whole words in any case, with their meanings."""
        return {term: meaning for term, meaning in self.words.items() if self._pattern(term).search(text)}

    def _parted(self, name: str) -> tuple[str, str]:
        return next(((name.removesuffix(end), end) for end in self.endings if name.endswith(end)), (name, ""))

    @staticmethod
    @cache
    def _pattern(term: str) -> re.Pattern[str]:
        return re.compile(rf"(?<![\w-]){re.escape(term)}s?(?![\w-])", re.IGNORECASE)


@cache
def words() -> Words:
    """Return the meanings, read once."""
    return Words(**yaml.safe_load(files("mhaprune.reporting").joinpath("words.yaml").read_text()))
