"""The tables of many runs, read at once: to read each by itself takes ten times as long."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from mhaprune.collecting.runs import FoundRun
from mhaprune.storage.seals import Damaged


class Slice(NamedTuple):
    """The table of a run as some of the rows of a larger one."""

    whole: pd.DataFrame
    start: int
    end: int

    @property
    def table(self) -> pd.DataFrame:
        table = self.whole.iloc[self.start : self.end]
        table.index = pd.RangeIndex(len(table))
        return table


Slices = Mapping[str, Slice]
"""The tables of a run by their names."""


def below_each_other(slices: Sequence[Slice]) -> pd.DataFrame:
    """One table of all their rows, in that order."""
    wholes = {id(each.whole): each.whole for each in slices}
    starts = dict(zip(wholes, np.cumsum([0, *map(len, wholes.values())]), strict=False))
    rows = np.concatenate([starts[id(whole)] + np.arange(start, end) for whole, start, end in slices])
    table = pd.concat(list(wholes.values()), ignore_index=True)
    return table if np.array_equal(rows, np.arange(len(table))) else table.iloc[rows].reset_index(drop=True)


def slices_of(runs: Sequence[FoundRun]) -> list[Slices | Damaged]:
    """Every table of each run by its name, or what is wrong with the run: a file that is missing, not as the run wrote
    it, or no table. A run that is compared with no other has none."""
    contents: dict[int, dict[str, bytes]] = {}
    damaged: dict[int, Damaged] = {}
    for i, run in enumerate(runs):
        try:
            contents[i] = {} if run.why_not is not None else run.contents()
        except Damaged as error:
            damaged[i] = error
    read: dict[int, dict[str, Slice]] = {i: {} for i in contents}
    for (name, _), members in _alike(runs, contents).items():
        for i, table in zip(members, _tables(name, [contents[i][name] for i in members]), strict=True):
            if isinstance(table, Damaged):
                damaged[i] = table
            else:
                read[i][name] = table
    return [damaged.get(i) or read[i] for i in range(len(runs))]


def _alike(
    runs: Sequence[FoundRun], contents: Mapping[int, Mapping[str, bytes]]
) -> dict[tuple[str, bytes | int], list[int]]:
    """The tables of one name that can be read together: with the same columns, and as the runs wrote them. What nobody
    vouches for may hold anything, and is read by itself."""
    groups: dict[tuple[str, bytes | int], list[int]] = {}
    for i, files in contents.items():
        for name, data in files.items():
            like = data.partition(b"\n")[0] if runs[i].files[f"{name}.csv"] is not None else i
            groups.setdefault((name, like), []).append(i)
    return groups


def _tables(name: str, files: Sequence[bytes]) -> list[Slice | Damaged]:
    """The tables in files with the same first line."""
    together = _together(files) if len(files) > 1 else None
    return [*together] if together is not None else [_alone(name, data) for data in files]


def _together(files: Sequence[bytes]) -> list[Slice] | None:
    """The tables of all files, parsed as one; None if one of them is no table, or breaks the rows of the others."""
    head, _, _ = files[0].partition(b"\n")
    bodies = [data.partition(b"\n")[2] for data in files]
    try:
        ends = [0, *accumulate(map(_rows, bodies))]
        table = _parsed(b"\n".join([head, *(body.rstrip(b"\n") for body in bodies if body.strip())]))
    except (ValueError, csv.Error):  # of the parser, or of the encoding
        return None
    if any(_mixes(table[name], ends) for name in table.select_dtypes(exclude=["number", "bool"])):
        return None
    return [Slice(table, start, end) for start, end in pairwise(ends)] if len(table) == ends[-1] else None


def _mixes(column: pd.Series, ends: Sequence[int]) -> bool:
    """Whether a column of texts holds only numbers in one file: there it is a column of numbers."""
    numbers = pd.to_numeric(column, errors="coerce").notna()
    if not numbers.any():
        return False
    fits = (numbers | column.isna()).to_numpy()
    return any(fits[start:end].all() for start, end in pairwise(ends) if numbers[start:end].any())


def _rows(body: bytes) -> int:
    """How many rows of a table there are; a line break may be within quotes."""
    if b'"' not in body:
        return body.count(b"\n") + (body[-1:] not in (b"\n", b""))
    return sum(map(bool, csv.reader(io.StringIO(body.decode(), newline=""))))


def _alone(name: str, data: bytes) -> Slice | Damaged:
    try:
        table = _parsed(data)
        return Slice(table, 0, len(table))
    except Exception as error:  # whatever pandas meets in a foreign file
        return Damaged(f"{name}.csv is no table ({' '.join(str(error).split())})")


def _parsed(data: bytes) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(data), low_memory=False)
