"""Measure the numbers of a saved model's card again."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from mhaprune.api.saved import load
from mhaprune.losses import Drift, Judge, name_of, quality_for
from mhaprune.measure.accuracy import accuracy_columns, by_kind
from mhaprune.measure.outcomes import measure
from mhaprune.saving.model_card import CARD, TABLE, counts_in, front_matter, lines_of, own_rows, written, wrote_card
from mhaprune.settings.ranges import checked
from mhaprune.subjects.batches import Batches
from mhaprune.surgery.record import Cut
from mhaprune.tables import KIND, by_block, head_names
from mhaprune.wrapping.build import call_plainly, with_dense
from mhaprune.wrapping.wrapped_model import WrappedModel

NOISE = 1e-5
"""The largest relative difference that another processor may make."""


@checked
def verify(
    path: str | Path,
    loss: Judge,
    batches: Any,
    *,
    quality: Judge | None = None,
    model: nn.Module | None = None,
    whole: nn.Module | None = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """Measure the numbers in the card of a folder that `save` wrote again, on the *report* batches that it was made
    with. The arguments are those of `wrap` and `load`; a loss that compares with the `whole` model needs it, and
    with it the card's row of that model is measured too.

    Return a row for each number: what it is, what the `card` says, what was `measured`, and whether they agree, to the
    digits of the card; None stands for what batches cannot show, such as a time, or the quality of other masks.

    >>> mask = heads.mask(keep=5)
    >>> mhaprune.save(heads.prune(mask=mask), "small", table=heads.evaluate(mask))
    >>> found = mhaprune.verify("small", losses.classification, batches, model=model)
    >>> bool(found["agrees"].dropna().all()), int(found["agrees"].count())
    (True, 12)
    """
    folder, judges = Path(path), (loss, quality or quality_for(loss))
    small = load(path, "cpu", trust_remote_code, model)
    if not wrote_card(folder):
        raise ValueError(f"path={path}: has no {CARD} of mhaprune.save, whose numbers could be measured")
    if isinstance(loss, Drift) and whole is None:
        raise ValueError("whole=None: this loss compares with the whole model, give it: whole=model")
    given, text = Batches.of(batches, "batches"), (folder / CARD).read_text()
    if isinstance(loss, Drift) and whole is not None:
        given = with_dense(_subject(whole, judges, call), given, loss)
    known = [_measured(each, judges, call, given) if each is not None else {} for each in (small, whole)]
    lines, table = lines_of(text), _table(text)
    rows = [*_removals(lines, Cut.of(small)), *_rows(table, lines, *known)]
    said = known[0].get(next((row[KIND] for row in table if row.get("worst") == "True"), ""), {})
    for metric in _metrics(front_matter(folder)):
        name, value = str(metric.get("type")), str(metric.get("value"))
        of = {"loss": "loss", name_of(judges[1]): "quality"}.get(name, "")
        rows.append(_compared(f"model-index: {name}", value, said.get(of)))
    return pd.DataFrame(rows, columns=["number", "card", "measured", "agrees"])


Numbers = dict[str, dict[str, Any]]
"""What was measured of a model, by kind and name."""


def _subject(model: nn.Module, judges: tuple[Judge, Judge], call: Any) -> WrappedModel:
    return WrappedModel(model.eval(), (), (), *judges, call or call_plainly)


def _measured(model: nn.Module, judges: tuple[Judge, Judge], call: Any, given: Batches) -> Numbers:
    outcome = measure(_subject(model, judges, call), given)
    return {kind: accuracy_columns(part) for kind, part in by_kind(outcome, given).items()}


def _table(card: str) -> list[dict[str, str]]:
    """Return the rows of the table in a card, as texts by column."""
    lines = [line for line in card.partition(f"{TABLE}\n")[2].splitlines() if line.startswith("| ")]
    names, _, *rows = [[cell.replace("&#124;", "|") for cell in line[2:-2].split(" | ")] for line in lines] or [[], []]
    return [dict(zip(names, row, strict=False)) for row in rows]


def _metrics(front: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the metrics of a front matter, which may be anybody's."""
    with suppress(TypeError, AttributeError, KeyError):
        for index in front.get("model-index") or ():
            for result in index["results"]:
                yield from result["metrics"]


def _compared(number: str, card: str, measured: Any) -> dict[str, Any]:
    """Return a row: a number of a card beside what was measured. Texts agree if they are equal, numbers if they are to
    the digits that `written` writes."""
    agrees: bool | None = None
    if isinstance(measured, str | int):
        agrees = card == str(measured)
    elif measured is not None:
        said = math.nan
        with suppress(ValueError):
            said = float(card)
        last = 10.0 ** (math.floor(math.log10(abs(measured))) - 3) if measured else 0.0  # worth of the fourth digit
        agrees = abs(said - measured) <= 0.51 * last + NOISE * abs(measured) or card == written(measured)
    return {"number": number, "card": card, "measured": measured, "agrees": agrees}


def _removals(lines: Sequence[str], cut: Cut | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each line of a card that says what was removed. The heads that it lists and those that the folder
    says are left must be all of their blocks, if there was one removal."""
    left = [set(each) for each in (cut.heads if cut else {}).values()]
    for at, line in enumerate(lines):
        removed, before, which = counts_in(line)
        lists = [[int(n) for n in part.rpartition(": ")[2].split()] for part in which.split(", ") if "unit" not in part]
        right = removed <= before and ("units" in which or removed == sum(map(len, lists)))
        right &= at == 0 or before == counts_in(lines[at - 1])[1] - counts_in(lines[at - 1])[0]
        if len(lines) == 1 and len(left) == len(lists) and "units" not in which:
            right &= all(
                {*gone} | kept == {*range(len(gone) + len(kept))} for gone, kept in zip(lists, left, strict=True)
            )
        yield {"number": f"removal {at + 1}", "card": line, "measured": None, "agrees": right}


def _rows(
    table: Sequence[dict[str, str]], lines: Sequence[str], small: Numbers, whole: Numbers
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of a table of `Heads.evaluate`, see `own_rows`."""
    removed, before, which = counts_in(lines[-1]) if lines else (0, 0, "")
    for at, (row, own) in enumerate(zip(table, own_rows(table, lines), strict=True)):
        mask = by_block(head_names(row.get("removed", "")))
        numbers = small if own else whole if "removed" in row and not mask else {}
        known = numbers.get(row.get(KIND, ""), {})
        if lines:
            gone = removed if own else len(head_names(row.get("removed", "")))
            known = {**known, "heads_kept": before - gone}
        if own and mask:
            known["removed"] = row["removed"] if mask == which else which
        for column, cell in row.items():
            if column not in (KIND, "worst") and (cell or column in known):
                name = " ".join(filter(None, [f"row {at + 1}", row.get(KIND), column]))
                yield _compared(name, cell, known.get(column))
