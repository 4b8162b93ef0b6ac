"""Measure the numbers of a saved model's card again."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from itertools import takewhile
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from mhaprune.api.saved import load
from mhaprune.losses import Drift, Judge, name_of, quality_for
from mhaprune.measure.accuracy import accuracy_columns, by_kind
from mhaprune.measure.outcomes import measure
from mhaprune.saving.model_card import CARD, TABLE, counts_in, front_matter, gone_in, lines_of, own_rows, wrote_card
from mhaprune.settings.ranges import checked
from mhaprune.settings.refusals import visible
from mhaprune.subjects.batches import Batches
from mhaprune.surgery.record import Cut
from mhaprune.tables import KIND
from mhaprune.wrapping.build import call_plainly, with_dense
from mhaprune.wrapping.wrapped_model import WrappedModel

NOISE = 1e-5
"""The largest difference that another processor may make, relative to the number or to 0.05 if that is larger."""


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
    device = "cpu" if whole is None else next(whole.parameters()).device
    small = load(path, device, trust_remote_code, model)
    if not wrote_card(folder):
        raise ValueError(f"path={path}: has no {CARD} of mhaprune.save, whose numbers could be measured")
    if isinstance(loss, Drift) and whole is None:
        raise ValueError("whole=None: this loss compares with the whole model, give it: whole=model")
    given, text = Batches.of(batches, "batches"), visible_lines((folder / CARD).read_text(errors="replace"))
    if isinstance(loss, Drift) and whole is not None:
        given = with_dense(_subject(whole, judges, call), given, loss)
    known = [_measured(each, judges, call, given) if each is not None else {} for each in (small, whole)]
    lines, table = lines_of(text), _table(text)
    rows = [*_removals(lines, Cut.of(small)), *_rows(table, lines, *known)]
    own = [row for row, of_it in zip(table, own_rows(table, lines), strict=True) if of_it]
    worst = next((row[KIND] for row in own if row.get("worst") == "True" and KIND in row), "")
    said = known[0].get(worst, {})
    for metric in _metrics(front_matter(folder)):
        of = {name_of(judges[1]): "quality", "loss": "loss"}.get(metric["type"], "")
        rows.append(_compared(f"model-index: {metric['type']}", metric["value"], said.get(of)))
    return pd.DataFrame(rows, columns=["number", "card", "measured", "agrees"])


Numbers = dict[str, dict[str, Any]]
"""What was measured of a model, by kind and name."""


def _subject(model: nn.Module, judges: tuple[Judge, Judge], call: Any) -> WrappedModel:
    return WrappedModel(model, (), (), *judges, call or call_plainly)


def _measured(model: nn.Module, judges: tuple[Judge, Judge], call: Any, given: Batches) -> Numbers:
    outcome = measure(_subject(model, judges, call), given)
    return {kind: accuracy_columns(part) for kind, part in by_kind(outcome, given).items()}


def visible_lines(card: str) -> str:
    """Return the text of a card, which may be anybody's, without signs that steer a terminal."""
    return "\n".join(map(visible, card.splitlines()))


def _table(card: str) -> list[dict[str, str]]:
    """Return the rows of the table in a card, as texts by column."""
    after = card.partition(f"{TABLE}\n")[2].strip().splitlines()
    lines = [*takewhile(lambda line: line.startswith("|"), after)]
    cells = [[cell.strip().replace("&#124;", "|") for cell in line.strip()[1:-1].split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=False)) for row in cells[2:]]


def _metrics(front: dict[str, Any]) -> list[dict[str, str]]:
    """Return types and values of the metrics of a front matter, as texts; nothing of one that has none of that form."""
    with suppress(TypeError, AttributeError, KeyError):
        results = [result for index in front.get("model-index") or () for result in index["results"]]
        metrics = [metric for result in results for metric in result["metrics"]]
        return [{name: visible(str(metric[name])) for name in ("type", "value")} for metric in metrics]
    return []


def _compared(number: str, card: str, measured: Any) -> dict[str, Any]:
    """Return a row: a number of a card beside what was measured. Texts agree if they are equal, numbers if they are to
    the digits that the card has."""
    agrees: bool | None = None
    if isinstance(measured, str | int) or (measured is not None and not math.isfinite(measured)):
        agrees = card == str(measured)
    elif measured is not None:
        agrees = False
        with suppress(InvalidOperation, OverflowError, TypeError):
            last = 10.0 ** int(Decimal(card).as_tuple().exponent)
            agrees = abs(float(card) - measured) <= 0.51 * last + NOISE * max(abs(measured), 0.05)
    return {"number": number, "card": card, "measured": measured, "agrees": agrees}


def _removals(lines: Sequence[str], cut: Cut | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each line of a card that says what was removed. The heads that it lists and those that the folder
    says are left must be all of their blocks, if heads were removed once and do not stream."""
    left = [{*each} for each in (cut.heads if cut else {}).values()]
    if left and not lines:
        yield {"number": "removal", "card": "", "measured": "heads are gone", "agrees": False}
    for at, line in enumerate(lines):
        removed, before, which = counts_in(line)
        lists = [[int(n) for n in part.rpartition(": ")[2].split()] for part in which.split(", ") if "unit" not in part]
        right = removed <= before and ("units" in which or removed == sum(map(len, lists)))
        if at and line.split()[3].rstrip(":") == lines[at - 1].split()[3].rstrip(":"):  # of the same unit
            right &= before == counts_in(lines[at - 1])[1] - counts_in(lines[at - 1])[0]
        if len(lines) == 1 and f" of {before} heads: " in line and "units" not in which and "see the first" not in line:
            right &= len(lists) == len(left) and before >= removed + sum(map(len, left))
            wholes = [[{*gone} | kept == {*range(len(gone) + len(kept))} for kept in left] for gone in lists]
            right &= all(map(any, wholes)) and all(map(any, zip(*wholes, strict=True)))
        yield {"number": f"removal {at + 1}", "card": line, "measured": None, "agrees": right}


def _rows(
    table: Sequence[dict[str, str]], lines: Sequence[str], small: Numbers, whole: Numbers
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of a table of `Heads.evaluate`, see `own_rows`. The whole model has rows with
    as many heads as there were before the first removal."""
    (removed, before, which), first = counts_in(lines[-1]) if lines else (0, 0, ""), lines and counts_in(lines[0])[1]
    for at, (row, own) in enumerate(zip(table, own_rows(table, lines), strict=True)):
        mask, kept = gone_in(row), row.get("heads_kept", "")
        dense = "removed" in row and not mask and (kept == str(first) or len(lines) < 2)
        known = (small if own else whole if dense else {}).get(row.get(KIND, ""), {})
        if lines and (mask or own):
            known = {**known, "heads_kept": before - (removed if own else len(row["removed"].split()))}
        elif lines and dense:
            known = {**known, "heads_kept": first}
        if own and mask:
            known["removed"] = row["removed"] if mask == which else which
        for column, cell in row.items():
            if column not in (KIND, "worst") and (cell or column in known):
                name = " ".join(filter(None, [f"row {at + 1}", row.get(KIND), column]))
                yield _compared(name, cell, known.get(column))
