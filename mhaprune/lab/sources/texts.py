"""Texts from a file of the user, divided into disjoint splits."""

import csv
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mhaprune.storage.locks import regular

COLUMNS = TEXT, LABEL, TARGET, CORRUPT, KIND = "text", "label", "target", "corrupt", "kind"
"""The columns of a file: the text for the model, its class, the text that should follow or be written, a counterpart of
the text that lacks the thing asked about, and the name of the kind of text."""


@dataclass(frozen=True)
class Row:
    """An example. A missing column is an empty text."""

    text: str
    label: str = ""
    target: str = ""
    corrupt: str = ""
    kind: str = ""
    place: str = field(default="data", compare=False)
    """The file and line of the example."""


def read_rows(path: str, *needed: str) -> list[Row]:
    """Return the rows of a file, always in the same random order.

    In `.txt` every line that is not empty is a text; `.csv` and `.jsonl` have a column `text` and may have `label`,
    `target`, `corrupt` and `kind`. Raises ValueError, with a message of one line, if the file cannot be read, or if the
    text or a `needed` column of a row is missing or empty. If one row has a counterpart or a kind, all need one.
    """
    readers = {".txt": _lines, ".csv": _csv, ".jsonl": _jsonl}
    kind = Path(path).suffix
    if kind not in readers:
        raise ValueError(f"data={path}: must be a file that ends in {', '.join(readers)}")
    rows = []
    try:
        # A byte order mark is skipped, and only \n, \r\n and \r end a line.
        with open(path, encoding="utf-8-sig", newline="" if kind == ".csv" else None, opener=regular) as file:
            for number, values in readers[kind](file):
                for name in (TEXT, *needed):
                    if name not in values:
                        raise ValueError(
                            f"line {number} has no {name}, it has {', '.join(values) or 'nothing'}"
                            f"{'; objective=drift needs none' if name == LABEL else ''}"
                        )
                    if not values[name].strip():
                        raise ValueError(f"line {number} has an empty {name}")
                read = {name: " ".join(values.get(name, "").split()) for name in COLUMNS}
                rows.append(Row(**read, place=f"data={path}: line {number}"))
    except OSError as error:
        raise ValueError(f"data={path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"data={path}: is no text in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"data={path}: {error}") from None
    if not rows:
        raise ValueError(f"data={path}: is empty, must hold a text in each line")
    for name, words in ((CORRUPT, "a corrupt text"), (KIND, "a kind")):
        if (count := sum(bool(getattr(row, name)) for row in rows)) not in (0, len(rows)):
            raise ValueError(f"data={path}: {count} of {len(rows)} lines have {words}, all or none must have one")
    random.Random(0).shuffle(rows)
    return rows


def kinds_in(path: str) -> int:
    """Return the number of kinds of text that a file names; 1 if it names none, or is no such file."""
    try:
        return len({row.kind for row in read_rows(path)})
    except ValueError:
        return 1  # who reads it will say why


def in_splits(rows: Sequence[Row], sizes: Mapping[str, int], where: str) -> dict[str, list[Row]]:
    """Return the rows of each split, taken in order; `sizes` has the number of rows of each split, in equal parts of
    all kinds. A repeated text is used once, so that no two splits share it. Raises ValueError if there are too few
    texts, and for a text of two kinds."""
    kinds = {row.kind for row in rows}
    if len(kinds) > 1:
        kind_of: dict[str, str] = {}
        for row in rows:
            if kind_of.setdefault(row.text, row.kind) != row.kind:
                raise ValueError(
                    f"{row.place}: is of kind {row.kind} and of {kind_of[row.text]}, kinds must share none"
                )
        parts = {name: size // len(kinds) for name, size in sizes.items()}
        if few := [name for name, size in parts.items() if size < 2]:
            raise ValueError(
                f"model.{few[0]}={sizes[few[0]]}: must have two texts or more for each of {len(kinds)} kinds"
            )
        found = [
            in_splits([row for row in rows if row.kind == kind], parts, f"{where}: kind {kind}")
            for kind in sorted(kinds)
        ]
        return {name: [row for split in found for row in split[name]] for name in sizes}
    distinct = list({row.text: row for row in reversed(rows)}.values())[::-1]
    if len(distinct) < sum(sizes.values()):
        wanted = " ".join(f"model.{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"{where}: has {len(distinct)} different texts, {wanted} need {sum(sizes.values())}, ask for fewer"
        )
    rest = iter(distinct)
    return {name: [next(rest) for _ in range(size)] for name, size in sizes.items()}


Numbered = Iterator[tuple[int, Mapping[str, str]]]
"""Pairs of a line number and a dict with the texts of this line, by column."""


def _lines(file: Iterable[str]) -> Numbered:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, {TEXT: line}


def _csv(file: Iterable[str]) -> Numbered:
    reader = csv.reader(file, strict=True)
    try:
        header = next(reader, [])
        if twice := [name for name in COLUMNS if header.count(name) > 1]:
            raise ValueError(f"line 1 has more than one column {twice[0]}")
        for values in filter(None, reader):
            if len(values) > len(header):
                raise ValueError(
                    f"line {reader.line_num} has {len(values)} fields, its header {len(header)}; a text with commas"
                    " stands in quotes"
                )
            yield reader.line_num, dict(zip(header, values, strict=False))
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} is no CSV ({error})") from None


def _jsonl(file: Iterable[str]) -> Numbered:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            # Numbers stay as they are written.
            values = json.loads(line, parse_int=str, parse_float=str, object_pairs_hook=_once)
            "".join(value for value in values.values() if isinstance(value, str)).encode()
        except AttributeError:
            raise ValueError(f"line {number} must be an object, like {{'text': '...'}}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is no JSON ({error})") from None
        for name in COLUMNS:
            if not isinstance(values.get(name, ""), str):
                given = json.dumps(values[name])[:40]
                raise ValueError(f"line {number} has {name}={given}, must be a text or a number")
        yield number, {name: value for name, value in values.items() if isinstance(value, str)}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := [name for name, _ in pairs if name in COLUMNS and [other for other, _ in pairs].count(name) > 1]:
        raise ValueError(f"more than one {twice[0]}")
    return dict(pairs)
