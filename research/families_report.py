"""The findings of families.py: a row for each case, sentences, and the table of docs/findings/families.md.

`python research/families_report.py results/families.csv --page docs/findings/families.md` writes the page anew.

Made docs/findings/families.md.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from tiny_models import OTHERS

EQUAL = 1e-5
"""The largest difference, relative to the largest output, of outputs that are called equal."""
GENERATED = re.compile(r"(?<=<!-- tables by research/families.py -->\n).*(?=<!-- end -->)", re.DOTALL)
"""The part of the page that holds the table."""
ALL = "tables/all-families.csv"
"""All rows, beside the page."""
SHORT = {"removable": "cut", "gates only": "gates only", "partly": "cut with one kind of attention only"}
"""How an outcome is called on the page."""
REASONS = {
    "no attention found": "no attention that mhaprune can find",
    "mixed before": "a W_O that is no linear module, or is not called",
    "a norm": "a norm over all heads",
    "of each group beside": "keys that are made once for several heads",
    "adapted by LoRA": "LoRA on the maps of a head, not merged",
    "does not run": "a module that counts on the old sizes",
    "W_O": "a W_O that is no linear module, or is not called",
    "random numbers": "numbers drawn at random in evaluation",
    "gradients cannot be traced": "gradients that cannot be traced on a CPU",
    "torch.compile": "a compiled model",
}
"""What a reason is called on the page, by a part of its text; the first that fits."""


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


def reason_of(row: Row) -> str:
    """Return the name of the reason why heads cannot be removed, or the reason itself."""
    return next((name for part, name in REASONS.items() if part in row.reason), row.reason)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table: for each outcome and reason how many models have it, and which."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, outcome in outcomes(rows).items():
        refused = [row for row in rows if row.model == name and row.reason and row.outcome != "removable"]
        reason = reason_of(refused[0]) if refused and outcome != "removable" else ""
        found.setdefault((outcome, reason), []).append(name)
    yield "| outcome | reason | families of transformers | other models | which |"
    yield "|---" * 5 + "|"
    order = ["removable", "partly", "gates only", "refused"]
    for outcome, reason in sorted(found, key=lambda key: order.index(key[0]) if key[0] in order else len(order)):
        names = found[outcome, reason]
        others = sum(name in OTHERS for name in names)
        which = f"[all rows]({ALL})" if outcome == "removable" else "; ".join(names)
        yield f"| {SHORT.get(outcome, outcome)} | {reason} | {len(names) - others} | {others} | {which} |"


def page(text: str, rows: Sequence[Row]) -> str:
    """Return the text of a page with the summary and the table in its generated part."""
    if not GENERATED.search(text):
        raise ValueError("page: has no lines <!-- tables by research/families.py --> and <!-- end -->")
    parts = [" ".join(summary(rows)), "\n".join(table(rows))]
    return GENERATED.sub(lambda _: "\n" + "\n\n".join(parts) + "\n\n", text)


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV that families.py wrote."""
    texts = {"kind": "", "outcome": "", "reason": ""}
    return [Row(**row) for row in pd.read_csv(path).fillna(texts).to_dict("records")]


def write(place: Path, rows: Sequence[Row]) -> None:
    """Write the generated part of a page, and all rows as CSV beside it."""
    place.write_text(page(place.read_text(encoding="utf-8"), rows), encoding="utf-8")
    (place.parent / ALL).parent.mkdir(exist_ok=True)
    pd.DataFrame(list(map(asdict, rows))).to_csv(place.parent / ALL, index=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="the rows that families.py wrote")
    parser.add_argument("--page", type=Path, required=True, help="the page to write anew")
    chosen = parser.parse_args(arguments)
    write(chosen.page, read(chosen.csv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
