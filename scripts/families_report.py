"""The findings of families.py: a row for each case, sentences, and the tables of docs/findings/families.md."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from tiny_models import OTHERS

EQUAL = 1e-5
"""The largest difference, relative to the largest output, of outputs that are called equal."""
GENERATED = re.compile(r"(?<=<!-- tables by scripts/families.py -->\n).*(?=<!-- end -->)", re.DOTALL)
"""The part of the page that holds the tables."""
SHORT = {"removable": "cut", "gates only": "gates", "not offered": "–"}
"""How an outcome is called in a table."""


@dataclass
class Row:
    """The facts about a model with one kind of attention."""

    model: str
    kind: str
    """eager or sdpa; empty for a model that is no family of transformers."""
    expected: int
    """The number of heads, counted by hand."""
    found: float = math.nan
    outcome: str = ""
    """removable, gates only, refused, not offered (by its class), skipped, or raw: an exception that is no line of
    mhaprune."""
    reason: str = ""
    difference: float = math.nan
    """Of the removed heads, or of the closed ones if they can only be gated, against hooks of this script."""
    effect: float = math.nan
    """How far these hooks move the outputs, also relative."""
    loaded: float | str = math.nan
    """The difference after `mhaprune.load` in a new process, or an error."""
    alone: float | str = math.nan
    """The same without mhaprune."""
    seconds: float = math.nan
    """The seconds of `wrap`."""

    @property
    def is_wrong(self) -> bool:
        """True for a raw exception, an output or a saved model that is not equal, a comparison that shows nothing
        (hooks that hardly change an output), and heads that are missing without a word."""
        compared = self.outcome in ("removable", "gates only")
        must: list[float | str] = [self.difference] if compared else []
        must += [self.loaded, *known([self.alone])] if self.outcome == "removable" else []
        if compared and (
            not self.effect > 100 * EQUAL or (self.found != self.expected and "not seen" not in self.reason)
        ):
            return True
        return self.outcome == "raw" or not all(map(is_equal, must))


def is_equal(value: float | str) -> bool:
    """Return whether a difference counts as none; an error never does."""
    return isinstance(value, float) and value <= EQUAL


def known(values: list[float | str]) -> list[float | str]:
    """Return the values without NaN, which stands for a model that was not saved or read."""
    return [value for value in values if value == value]


def outcomes(rows: Sequence[Row]) -> dict[str, str]:
    """Return for every model one of removable, partly (not with each kind of attention), gates only, refused, ..."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(row.model for row in rows):
        of_kinds = {row.outcome for row in rows if row.model == name} - {"not offered"}
        found[name] = of_kinds.pop() if len(of_kinds) == 1 else "partly" if "removable" in of_kinds else "mixed"
    return found


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what was found, in sentences."""
    for what, of_others in (("families of transformers", False), ("other models", True)):
        found = [each for name, each in outcomes(rows).items() if (name in OTHERS) == of_others and each != "skipped"]
        counts = pd.Series(found, dtype=object).value_counts()
        rest = [f", {count} {outcome}" for outcome, count in counts.items() if outcome != "removable"]
        if found:
            yield f"{counts.get('removable', 0)} of {len(found)} {what} can be cut{''.join(rest)}."
    if cut := [row for row in rows if row.outcome == "removable"]:
        most = max(row.difference for row in cut)
        yield f"Removed and masked differ by at most {most:.1e} of the largest output, in {len(cut)} cases."
        least = min(row.effect for row in cut)
        yield f"The removed heads themselves change an output by {least:.1e} of it or more."
        for what in ("loaded", "alone"):
            read = known([getattr(row, what) for row in cut])
            how = "by mhaprune.load" if what == "loaded" else "without mhaprune"
            yield f"{sum(map(is_equal, read))} of {len(read)} saved models are equal in a new process, {how}."
    if fewer := dict.fromkeys(row.model for row in rows if row.found < row.expected):
        yield f"Only a part of the heads is found in {', '.join(fewer)}."
    for row in rows:
        if row.outcome == "skipped":
            yield f"Skipped: {row.model} {row.reason}."
        if row.is_wrong:
            yield f"WRONG: {row}"


def table(rows: Sequence[Row], kinds: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table with a row for each model. Differences are the largest over its kinds of attention."""
    yield f"| model | heads | {' | '.join(kind or 'outcome' for kind in kinds)} | difference | read again |"
    yield "|---" * (4 + len(kinds)) + "|"
    for name in dict.fromkeys(row.model for row in rows if row.kind in kinds):
        own = [row for row in rows if row.model == name]
        found = {int(row.found) for row in own if row.found == row.found}
        heads = " ".join(f"{each} of {own[0].expected}" if each != own[0].expected else str(each) for each in found)
        cells = [SHORT.get(row.outcome, row.outcome) for row in own]
        differences = [row.difference for row in own if row.difference == row.difference]
        cut = [row for row in own if row.outcome == "removable"]
        both = "yes" if known([row.alone for row in cut]) else "by mhaprune"
        again = "" if not cut else "**no**" if any(row.is_wrong for row in cut) else both
        cells += [f"{max(differences):.0e}".replace("0e+00", "0") if differences else "", again]
        heads = heads or (f"– of {own[0].expected}" if own[0].expected else "0")
        yield f"| {name} | {heads} | {' | '.join(cells)} |"


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each reason, with the models that have it, by the kind of outcome."""
    each = outcomes(rows)
    for outcome in ("gates only", "refused", "raw", "removable"):
        found: dict[str, dict[str, None]] = {}
        for row in rows:
            if row.outcome == outcome and row.reason:
                said = re.sub(r"^\w+: (?=no attention)", "", row.reason.partition(". Name")[0])
                name = f"{row.model} ({row.kind})" if each[row.model] == "partly" else row.model
                found.setdefault(said, {})[name] = None
        for said, names in found.items():
            yield f"- {SHORT.get(outcome, outcome)}: **{', '.join(names)}**: {said}".replace("<", "\\<")


def page(text: str, rows: Sequence[Row]) -> str:
    """Return the text of a page with the summary, the tables and the reasons in its generated part."""
    if not GENERATED.search(text):
        raise ValueError("page: has no lines <!-- tables by scripts/families.py --> and <!-- end -->")
    parts = [" ".join(summary(rows)), *("\n".join(table(rows, kinds)) for kinds in (("eager", "sdpa"), ("",)))]
    parts += ["\n".join(reasons(rows))]
    return GENERATED.sub(lambda _: "\n" + "\n\n".join(parts) + "\n\n", text)
