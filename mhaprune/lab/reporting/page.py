"""Sentences, figures and tables in one self-contained HTML file."""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from pandas.api.types import is_numeric_dtype

from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.plots import Plot
from mhaprune.lab.reporting.words import words
from mhaprune.tables import Tables, varying

LONGEST = 500
"""Largest number of rows of a table on the page; the table's file has all rows."""
MAP = "matter"
"""The name of the figure that stands beside the answer: the map of heads."""


class FirstScreen(NamedTuple):
    """The top of a page: what was asked, and what was found in numbers."""

    question: str = ""
    """The question, above the first sentence."""
    numbers: Sequence[Number] = ()
    """The numbers beside it."""
    then: str = ""
    """What to do next. Commands in it stand between backticks."""
    view: Mapping[str, Any] | None = None
    """The attention that can be touched, see `attention_view`; None without one."""


NOTHING_ASKED = FirstScreen()


def proof_sentences(checks: Mapping[str, float]) -> list[str]:
    """Return a sentence for each proof of a run."""
    lines = []
    if "max_difference_masked_removed" in checks:
        lines.append(
            "Removed equals masked: computed in float64, no output that was compared differs by more than"
            f" {checks['max_difference_masked_removed']:.1e} for any set of heads removed here."
        )
    if not math.isnan(checks.get("smallest_gate_effect", math.nan)):
        lines.append(
            "Gates have an effect: every block has a gate on which the outputs depend (the derivative is"
            f" {checks['smallest_gate_effect']:.2g} or more, and exactly 0 for a gate without effect)."
        )
    if "greedy_decoding_disagreements" in checks:
        count = int(checks["greedy_decoding_disagreements"])
        lines.append(
            "Exact match was checked by writing the answers with the KV cache:"
            f" {count or 'no'} example{'s' * (count > 1)} of the report split differ{'s' * (count < 2)}."
        )
    return lines


def render(
    title: str,
    lines: Sequence[str],
    plots: Iterable[Plot],
    tables: Tables,
    facts: Mapping[str, Any],
    checks: Sequence[str] = (),
    first: FirstScreen = NOTHING_ASKED,
) -> str:
    """Return the whole page. `facts` describe the run. Tables are folded, and cut after `LONGEST` rows. The first time
    that a term of `words` is used, a text on hover explains it."""
    figures = list(plots)
    read = "\n".join([first.question, *lines, *checks, *(each.caption for each in figures)])
    return fill(
        "report",
        base64=lambda content: base64.b64encode(content).decode(),
        explained=partial(_explained, set()),
        title=title,
        lines=lines,
        first=first,
        groups=[list(group) for _, group in groupby(first.numbers, attrgetter("after"))],
        map=next((each for each in figures if each.name == MAP), None),
        figures=[each for each in figures if each.name != MAP],
        tables=[_table(name, frame) for name, frame in tables.items()],
        longest=LONGEST,
        facts=facts,
        checks=checks,
        glossary=words().used_in(read),
    )


def _explained(seen: set[str], text: str) -> Markup:
    """Return a text as HTML: what stands between backticks as code, and each term that is not yet among those `seen`
    with its meaning, which a browser shows on hover."""
    glossary = words()
    parts = []
    for i, part in enumerate(text.split("`")):
        if i % 2:
            parts.append(Markup("<code>{}</code>").format(part))
            continue
        ends = 0
        for found in glossary.anywhere.finditer(part):
            term = glossary.term(found[0])
            if term not in seen:
                seen.add(term)
                abbr = Markup('<abbr title="{}" tabindex="0">{}</abbr>').format(glossary.words[term], found[0])
                parts += [escape(part[ends : found.start()]), abbr]
                ends = found.end()
        parts.append(escape(part[ends:]))
    return Markup("").join(parts)


def _table(name: str, frame: pd.DataFrame) -> dict[str, Any]:
    """Return a table as the page shows it: its first rows, and separately the columns with one value in all rows."""
    shown = varying(frame) if len(frame) > 1 else list(frame)
    return {
        "name": name,
        "count": len(frame),
        "text": words().table(name),
        "columns": {each: (is_numeric_dtype(frame[each]), words().column(each)) for each in shown},
        "rows": list(frame[shown][:LONGEST].itertuples(index=False, name=None)),
        "same": {each: frame[each].iloc[0] for each in frame if each not in shown},
    }


def as_text(value: object) -> str:
    """Return a value as text: numbers with four digits, empty for a missing value."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return "" if value is None or value is pd.NA else str(value)


def fill(template: str, **values: Any) -> str:
    """Return a template filled with `values`, which are escaped. Raises jinja2's UndefinedError for a missing value."""
    return _templates().get_template(f"{template}.html.jinja").render(**values)


@cache
def _templates() -> Environment:
    """Return the templates, which are compiled once."""
    loader = PackageLoader("mhaprune.lab.reporting", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters["text"] = as_text
    return environment
