"""Words, figures and tables in one self-contained HTML file that a person can read and send on."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from mhaprune.experiments.explain.words import looks_details, looks_headline, looks_over_runs
from mhaprune.experiments.prune.words import smallest_details, smallest_headline, smallest_over_runs
from mhaprune.experiments.speed.words import speed_details, speed_headline
from mhaprune.reporting.plots import Plot, Tables
from mhaprune.reporting.verdict import largest_budget
from mhaprune.scorers.agreement import CONTROL
from mhaprune.statistics import student_interval

LONGEST = 500
"""Rows of a table that the page shows; its file has all of them."""
INITIAL_GATE = "gate before training"
"""What the table `agreement` calls the gates at step 0."""


def answers(tables: Tables) -> list[str]:
    """What was found, in sentences; of several runs one each, which starts with the run's label."""
    lines: list[str] = []
    headlines: dict[str, tuple[Callable[[pd.DataFrame], str], Callable[[Tables], Iterable[str]]]] = {
        "summary": (_pruning_headline, _pruning_details),
        "winner": (_winner_headline, _winner_details),
        "smallest": (smallest_headline, smallest_details),
        "sizes": (speed_headline, speed_details),
        "looks": (looks_headline, looks_details),
        "accuracy": (_accuracy_headline, lambda tables: ()),
    }
    if "methods" in tables and "label" in tables["methods"]:
        lines += _methods_headlines(tables["methods"])
    if "smallest" in tables and "label" in tables["smallest"]:
        lines += smallest_over_runs(tables["smallest"])
    if "looks" in tables and "label" in tables["looks"]:
        lines += looks_over_runs(tables["looks"])
    for name, (headline, details) in headlines.items():
        if name in tables and "label" in tables[name]:
            lines += [f"{label!s}: {headline(rows)}" for label, rows in tables[name].groupby("label", sort=False)]
        elif name in tables:
            lines += [headline(tables[name]), *details(tables)]
    return lines


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
        lines.append(f"The mask bites: every block has a head whose closing moves a logit by {bite:.2g} or more.")
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
    shown = {
        name: _readable(frame[:LONGEST]).to_html(index=False, border=0, na_rep="") for name, frame in tables.items()
    }
    environment = Environment(loader=PackageLoader("mhaprune", "."), autoescape=True, undefined=StrictUndefined)
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


def _pruning_headline(summary: pd.DataFrame) -> str:
    best = largest_budget(summary)
    total, dense = int(best["heads_total"]), best["dense_sequence_accuracy"]
    if best["heads_removed"] == 0:
        return (
            f"None of {total} heads can go within {best['tolerance']:g} of the dense model's {dense:.2f} exact match."
        )
    equals = summary.loc[summary["heads_removed"] == best["heads_removed"], "scorer"]
    return (
        f"{int(best['heads_removed'])} of {total} heads can go at {best['sequence_accuracy']:.2f} exact match"
        f" ({dense:.2f} with all), as chosen by {best['scorer']}{' and by others' if len(equals) > 1 else ''};"
        f" greedy decoding is then {best['speedup']:.2f}× as fast"
        f" (quartiles {best['speedup_q1']:.2f}–{best['speedup_q3']:.2f})."
    )


def _pruning_details(tables: Tables) -> list[str]:
    rows = _records(tables["summary"])
    best = largest_budget(tables["summary"])
    lines = []
    if best["heads_removed"] > 0:
        names = str(best["removed"]).replace(" ", ", ")
        lines.append(f"They are (site.layer.head, counted from 0): {names}. All others are kept.")
    parts = [
        f"{int(row['heads_removed']) or 'none'} by {row['scorer']}"
        + (f" (at {row['sequence_accuracy']:.2f})" if row["heads_removed"] else "")
        for row in rows
    ]
    lines.append(
        f"The largest budget within {best['tolerance']:g} of exact match on the choose split, scorer by scorer:"
        f" {', '.join(parts)}."
    )
    rhos = [
        f"{row['scorer']} at ρ = {row['spearman_with_ablation']:.2f}"
        for row in _records(tables["summary"].dropna(subset=["spearman_with_ablation"]))
    ]
    if rhos:
        lines.append(f"Agreement with ablation over the heads (Spearman): {', '.join(rhos)}.")
    for row in _records(tables.get("agreement", pd.DataFrame())):
        if row["other"] == INITIAL_GATE:
            lines.append(f"The learned gates against what they started from: Spearman ρ = {row['spearman']:.2f}.")
    return lines


def _winner_headline(winner: pd.DataFrame) -> str:
    row = winner.iloc[0]
    best = "best subset" if row["oracle"] == "exact" else "best subset found"
    line = (
        f"{row['winner']} chooses best: on average over the budgets its heads cost"
        f" {100 * row['regret_sequence_accuracy']:.1f} points of exact match against the {best}"
        f" (95 % interval {100 * row['regret_sequence_accuracy_low']:.1f} to"
        f" {100 * row['regret_sequence_accuracy_high']:.1f})"
    )
    if not isinstance(row["runner_up"], str):
        return f"{line}."
    points = f"{100 * abs(row['margin']):.1f} points"
    interval = f"({100 * row['margin_low']:.1f} to {100 * row['margin_high']:.1f}, sign-flip p = {row['margin_p']:.2g})"
    if row["verdict"] == "behind":
        return (
            f"{line}; {row['runner_up']}, second on the choose split, does better by {points} on the report split"
            f" {interval}, which is beyond the noise."
        )
    beyond = "beyond" if row["verdict"] == "ahead" else "within"
    side = "behind" if row["margin"] >= 0 else "ahead on the report split"
    return f"{line}; {row['runner_up']} comes next, {points} {side} {interval}, which is {beyond} the noise."


def _winner_details(tables: Tables) -> list[str]:
    row, lines = tables["winner"].iloc[0], []
    if "prunable_heads" in row and not math.isnan(row["prunable_heads"]):
        lines.append(
            f"{int(row['prunable_heads'])} of {int(row['heads_total'])} heads are prunable one at a time: at 95 %"
            f" confidence the ablation of each costs less than {row['prunable_tolerance']:g} nats."
        )
    if not math.isnan(row["leak"]):
        lines.append(
            "Leak: with scoring, choosing and reporting on one split, the best choices would have been reported"
            f" {100 * abs(row['leak']):.1f} points of exact match {'higher' if row['leak'] >= 0 else 'lower'}"
            f" ({100 * row['leak_low']:+.1f} to {100 * row['leak_high']:+.1f})."
        )
    return lines


def _methods_headlines(methods: pd.DataFrame) -> Iterator[str]:
    """Over the runs of each task: the scorer that does best on the choose splits, with intervals over runs."""
    for task, mine in methods[methods["family"] != CONTROL].groupby("task", sort=False):
        chosen, regrets = (
            mine.pivot_table(index="label", columns="scorer", values=column, sort=False).dropna(axis="columns")
            for column in ("choose_sequence_accuracy", "regret_sequence_accuracy")
        )
        if len(chosen) < 2 or chosen.shape[1] == 0:
            continue
        order = chosen.mean().sort_values(ascending=False, kind="stable").index
        best = regrets[order[0]]
        line = (
            f"Over {len(chosen)} runs on {task} {order[0]} chooses best: its heads cost {_points(best)} of exact match"
            " against the best subsets (mean over budgets and runs, 95 % interval over runs)"
        )
        if len(order) > 1:
            line += f"; {order[1]} comes next, by {_points(regrets[order[1]] - best)} more"
        yield f"{line}."


def _points(shares: pd.Series) -> str:
    low, high = student_interval(shares)
    return f"{100 * shares.mean():.1f} points ({100 * low:.1f} to {100 * high:.1f})"


def _accuracy_headline(accuracy: pd.DataFrame) -> str:
    row = accuracy.iloc[0]
    return (
        f"{row['sequence_accuracy']:.3f} exact match"
        f" (95 % interval {row['sequence_accuracy_low']:.3f}–{row['sequence_accuracy_high']:.3f}),"
        f" {row['token_accuracy']:.4f} token accuracy on the report split."
    )


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _readable(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.map(lambda value: f"{value:.4g}" if isinstance(value, float) and not math.isnan(value) else value)
