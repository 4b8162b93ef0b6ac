"""Sentences, figures and tables in one self-contained HTML file."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import escape

from mhaprune.reporting.plots import Plot
from mhaprune.tables import Tables

LONGEST = 500
"""Rows of a table that the page shows; its file has all of them."""


def proof_sentences(checks: Mapping[str, float]) -> list[str]:
    """The proofs of a run, in sentences."""
    lines = []
    if "max_difference_masked_removed" in checks:
        lines.append(
            "Removed equals masked: computed in float64, no output differs by more than"
            f" {checks['max_difference_masked_removed']:.1e} for any set of heads removed here."
        )
    if not math.isnan(checks.get("min_difference_open_closed", math.nan)):
        bite = checks["min_difference_open_closed"]
        lines.append(f"The mask bites: every block has a head whose closing moves an output by {bite:.2g} or more.")
    if "max_difference_wide_independent" in checks:
        lines.append(
            "One wide projection is an independent one for every head: computed head by head in float64, the output of"
            f" a layer differs by {checks['max_difference_wide_independent']:.1e} at most, also where queries, keys and"
            " values have sizes of their own."
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
    """The whole page. `facts` say what was run and where; long tables are folded, and cut after `LONGEST` rows."""
    figures = [
        {"alt": plot.alt or plot.caption, "caption": plot.caption, "data": base64.b64encode(plot.svg).decode()}
        for plot in plots
    ]
    shown = {name: _html(frame[:LONGEST]) for name, frame in tables.items()}
    environment = Environment(
        loader=PackageLoader("mhaprune.reporting", "."), autoescape=True, undefined=StrictUndefined
    )
    sizes = {name: len(frame) for name, frame in tables.items()}
    return environment.get_template("report.html.jinja").render(
        title=title,
        lines=lines,
        figures=figures,
        tables=shown,
        sizes=sizes,
        longest=LONGEST,
        facts=facts,
        checks=checks,
    )


def _html(frame: pd.DataFrame) -> str:
    """The table as HTML. What pandas has for that takes ten times as long."""
    names = "".join(f"<th>{escape(name)}</th>" for name in frame)
    columns = [[_cell(value) for value in frame[name]] for name in frame]
    rows = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in zip(*columns, strict=True))
    return f"<table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def _cell(value: object) -> str:
    """Numbers with four digits; empty for what is not there."""
    if isinstance(value, float):
        return "<td></td>" if math.isnan(value) else f"<td>{value:.4g}</td>"
    return "<td></td>" if value is None or value is pd.NA else f"<td>{escape(value)}</td>"
