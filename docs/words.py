"""The pages of words and of tables, made from the file that the reports read: mhaprune/lab/reporting/words.yaml."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

WORDS = Path(__file__).resolve().parent.parent / "mhaprune" / "lab" / "reporting" / "words.yaml"


def glossary() -> str:
    """Return the terms with their sentences. A page links to a term by {term}`head`."""
    entries = (f"{term}\n  {sentence}\n" for term, sentence in _part("words"))
    return "\n".join(["```{glossary}", *entries, "```"])


def tables() -> str:
    """Return a row for each table: its rows in a sentence, and the experiments that write it."""
    rows = (
        f"| `{name}` | {about['text']} | {', '.join(f'`{each}`' for each in about['experiments'])} |"
        for name, about in _part("tables")
    )
    return "\n".join(["| table | what it holds | written by |", "|---|---|---|", *rows])


def columns() -> str:
    """Return a row for each column, after those for the endings that many columns share."""
    endings = [(f"*{ending}", sentence) for ending, sentence in _part("endings")]
    rows = (f"| `{name}` | {sentence} |" for name, sentence in [*endings, *_part("columns")])
    return "\n".join(["| column | what it holds |", "|---|---|", *rows])


def _part(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a part in the order of the alphabet, upper and lower case together."""
    part: Mapping[str, Any] = yaml.safe_load(WORDS.read_text(encoding="utf-8"))[name]
    for term in sorted(part, key=str.casefold):
        yield term, part[term]
