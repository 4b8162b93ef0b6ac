"""Texts from a file of the user, and three disjoint splits of them."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TEXT, LABEL, TARGET = "text", "label", "target"
"""The columns of a file: what a model reads, its class, and what an encoder-decoder should write."""


class Row(NamedTuple):
    """An example. What a file does not say is empty."""

    text: str
    label: str = ""
    target: str = ""


def read_rows(path: str, *needed: str) -> list[Row]:
    """The rows of a file, in an order that is always the same and not that of the file.

    In `.txt` every line that is not empty is a text; `.csv` and `.jsonl` have the columns `text` and `label` or
    `target`. Raises ValueError, one line, for a file that cannot be read, and where a column that is `needed` is
    missing or empty.
    """
    readers = {".txt": _lines, ".csv": _csv, ".jsonl": _jsonl}
    kind = Path(path).suffix
    if kind not in readers:
        raise ValueError(f"data={path}: must be a file that ends in {', '.join(readers)}")
    rows = []
    try:
        for number, values in readers[kind](Path(path)):
            for name in (TEXT, *needed):
                if name not in values:
                    raise ValueError(
                        f"data={path}: line {number} has no {name}, it has {', '.join(values) or 'nothing'}"
                        f"{'; objective=drift needs none' if name == LABEL else ''}"
                    )
                if not values[name].strip():
                    raise ValueError(f"data={path}: line {number} has an empty {name}")
            rows.append(Row(*(" ".join(values.get(name, "").split()) for name in Row._fields)))
    except OSError as error:
        raise ValueError(f"data={path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"data={path}: is no text in UTF-8") from None
    if not rows:
        raise ValueError(f"data={path}: is empty, must hold a text in each line")
    random.Random(0).shuffle(rows)
    return rows


def in_splits(rows: Sequence[Row], sizes: Mapping[str, int], where: str) -> dict[str, list[Row]]:
    """So many rows for each split, in order. A text that is there twice is taken once, so that no split shares it with
    another. Raises ValueError if there are too few."""
    distinct = list({row.text: row for row in reversed(rows)}.values())[::-1]
    if len(distinct) < sum(sizes.values()):
        wanted = " ".join(f"model.{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"{where}: has {len(distinct)} different texts, {wanted} need {sum(sizes.values())}, ask for fewer"
        )
    rest = iter(distinct)
    return {name: [next(rest) for _ in range(size)] for name, size in sizes.items()}


Numbered = Iterator[tuple[int, Mapping[str, str]]]
"""The number of a line and what it says, by column."""


def _lines(path: Path) -> Numbered:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            yield number, {TEXT: line}


def _csv(path: Path) -> Numbered:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        for values in reader:
            yield reader.line_num, {name: value for name, value in values.items() if name and isinstance(value, str)}


def _jsonl(path: Path) -> Numbered:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"data={path}: line {number} is no JSON ({error.msg})") from None
        if not isinstance(values, dict):
            raise ValueError(f"data={path}: line {number} must be an object, like {{'text': '...'}}")
        yield number, {str(name): str(value) for name, value in values.items()}
