"""Sentences, figures and tables in one self-contained HTML file."""

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from pandas.api.types import is_numeric_dtype

from mhaprune.reporting.plots import Plot
from mhaprune.tables import Tables, varying

LONGEST = 500
"""Largest number of rows of a table on the page; the table's file has all rows."""


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
    if "max_difference_wide_independent" in checks:
        lines.append(
            "One wide projection is an independent one for every head: computed head by head in float64, the output of"
            f" the layer differs by {checks['max_difference_wide_independent']:.1e} at most."
        )
    if "greedy_decoding_disagreements" in checks:
        count = int(checks["greedy_decoding_disagreements"])
        lines.append(
            f"Greedy decoding with the KV cache and exact match disagree on {count} examples of the report split."
        )
    return lines


def render(
    title: str,
    lines: Sequence[str],
    plots: Iterable[Plot],
    tables: Tables,
    facts: Mapping[str, Any],
    checks: Sequence[str] = (),
) -> str:
    """Return the whole page. `facts` describe the run. Long tables are folded, and cut after `LONGEST` rows."""
    return fill(
        "report",
        {"base64": lambda content: base64.b64encode(content).decode()},
        title=title,
        lines=lines,
        figures=list(plots),
        tables=[_table(name, frame) for name, frame in tables.items()],
        longest=LONGEST,
        facts=facts,
        checks=checks,
    )


def _table(name: str, frame: pd.DataFrame) -> dict[str, Any]:
    """Return a table as the page shows it: its first rows, and separately the columns with one value in all rows."""
    shown = varying(frame) if len(frame) > 1 else list(frame)
    return {
        "name": name,
        "count": len(frame),
        "columns": {each: is_numeric_dtype(frame[each]) for each in shown},
        "rows": list(frame[shown][:LONGEST].itertuples(index=False, name=None)),
        "same": {each: frame[each].iloc[0] for each in frame if each not in shown},
    }


def _text(value: object) -> str:
    """Return a value as text: numbers with four digits, empty for a missing value."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return "" if value is None or value is pd.NA else str(value)


def fill(template: str, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """Return a template filled with `values`, which are escaped. Raises jinja2's UndefinedError for a missing value."""
    loader = PackageLoader("mhaprune.reporting", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"text": _text, **(filters or {})}
    return environment.get_template(f"{template}.html.jinja").render(**values)
