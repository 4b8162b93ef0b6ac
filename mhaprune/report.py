"""Words, figures and tables in one self-contained HTML file that a person can read and send on."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from mhaprune.plots import Plot


def answers(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """What was found, in sentences; of several runs each sentence starts with the run's label."""
    if "summary" in tables:
        summary = tables["summary"]
        groups = summary.groupby("label", sort=False) if "label" in summary else [("", summary)]
        return [f"{label}: {line}" if label else line for label, rows in groups for line in _pruning_answers(rows)]
    if "accuracy" in tables:
        rows = tables["accuracy"].pipe(_records)
        return [f"{row['label']}: {_accuracy_answer(row)}" if "label" in row else _accuracy_answer(row) for row in rows]
    return []


def check_answers(checks: Mapping[str, float]) -> list[str]:
    """The proofs of a run, in sentences."""
    lines = []
    if "max_difference_masked_removed" in checks:
        lines.append(
            "Removed equals masked: computed in float64, no logit differs by more than"
            f" {checks['max_difference_masked_removed']:.1e} for any set of heads removed here."
        )
    if not math.isnan(checks.get("min_difference_open_closed", math.nan)):
        bite = checks["min_difference_open_closed"]
        lines.append(f"The mask bites: closing a head that scored highest moves a logit by {bite:.2g} or more.")
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
    tables: Mapping[str, pd.DataFrame],
    facts: Mapping[str, Any],
    checks: Sequence[str] = (),
) -> str:
    """The whole page. `facts` say what was run and where; tables are shown whole, the long ones folded."""
    figures = [
        {"name": plot.name, "caption": plot.caption, "data": base64.b64encode(plot.svg).decode()} for plot in plots
    ]
    shown = {name: _readable(frame).to_html(index=False, border=0, na_rep="") for name, frame in tables.items()}
    environment = Environment(loader=PackageLoader("mhaprune", "."), autoescape=True, undefined=StrictUndefined)
    sizes = {name: len(frame) for name, frame in tables.items()}
    return environment.get_template("report.html.jinja").render(
        title=title, lines=lines, figures=figures, tables=shown, sizes=sizes, facts=facts, checks=checks
    )


def _pruning_answers(summary: pd.DataFrame) -> list[str]:
    best = summary.sort_values(["heads_removed", "sequence_accuracy"], ascending=False, kind="stable").iloc[0]
    lines = [
        f"{int(best['heads_removed'])} of {int(best['heads_total'])} heads can go"
        f" at {best['sequence_accuracy']:.2f} exact match ({best['dense_sequence_accuracy']:.2f} with all),"
        f" those lowest by {best['scorer']};"
        f" greedy decoding is then {best['speedup']:.2f}× as fast"
        f" (quartiles {best['speedup_q1']:.2f}–{best['speedup_q3']:.2f})."
    ]
    for row in summary.pipe(_records):
        if row["scorer"] != best["scorer"]:
            lines.append(
                f"By {row['scorer']}, {int(row['heads_removed'])} of {int(row['heads_total'])} can go"
                f" at {row['sequence_accuracy']:.2f} exact match."
            )
    correlated = summary.dropna(subset=["spearman_with_ablation"])
    if len(correlated):
        parts = [f"{row['scorer']} at ρ = {row['spearman_with_ablation']:.2f}" for row in correlated.pipe(_records)]
        lines.append(f"Agreement with ablation over the heads (Spearman): {', '.join(parts)}.")
    return lines


def _accuracy_answer(row: Mapping[str, Any]) -> str:
    return (
        f"{row['sequence_accuracy']:.3f} exact match"
        f" (95 % interval {row['sequence_accuracy_low']:.3f}–{row['sequence_accuracy_high']:.3f}),"
        f" {row['token_accuracy']:.4f} token accuracy on the report split."
    )


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _readable(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.map(lambda value: f"{value:.4g}" if isinstance(value, float) and not math.isnan(value) else value)
