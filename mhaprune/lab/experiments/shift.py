"""The tables `groups`, `shift` and `held_out`: pruned models on each kind of the usual examples, on examples of other
kinds, and on longer ones than a recovery read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from mhaprune.data import Data, Splits
from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.names import in_percent, quality_name, unit_name
from mhaprune.lab.reporting.plots import Plot, needs
from mhaprune.lab.reporting.sentences import quality_of
from mhaprune.measure.accuracy import accuracy_columns, by_group, calibration_columns, drop_columns
from mhaprune.measure.outcomes import BATCH_SIZE, measure
from mhaprune.progress import doing
from mhaprune.recoveries.base import recover
from mhaprune.subject import Subject
from mhaprune.subjects.batches import LABELS
from mhaprune.tables import DENSE, NOTHING, QUALITY, USUAL, Tables

MOST_LABELS = 30
"""Largest number of labels that are groups."""
PART = 8
"""Smallest number of examples in a range of lengths."""
ALL_LENGTHS = "all lengths"


def groups_of(study: Study) -> list[str]:
    """Return the group of each example of the report split: that of the task; else its kind, if kinds are told apart;
    else its label, if there are few labels; else its length, in four parts of equal size, fewer if a part would have
    fewer than `PART` examples."""
    report = study.splits.report
    if kinds := report.by_kind():
        named = sorted((int(row), kind) for kind, rows in kinds.items() for row in rows)
        return [kind for _, kind in named]
    if study.task is not None:
        return [study.task.group(source) for source in report.source.tolist()]
    labels = [batch.fields.get(LABELS) for batch in report.batches(BATCH_SIZE)]
    if all(isinstance(each, Tensor) and each.dim() == 1 and not each.is_floating_point() for each in labels):
        names = [f"label {label}" for label in torch.cat(labels).tolist()]
        if len(set(names)) <= MOST_LABELS:
            return names
    lengths = pd.Series(report.lengths().tolist())
    parts = max(1, min(4, len(lengths) // PART))
    return list(lengths.groupby(pd.qcut(lengths, parts, labels=False, duplicates="drop")).transform(_from_to))


def _from_to(lengths: pd.Series) -> str:
    low, high = lengths.min(), lengths.max()
    return f"{low} tokens" if low == high else f"{low} to {high} tokens"


@doing("other examples")
def shift_table(
    subject: Subject,
    splits: Splits[Data],
    groups: Sequence[str],
    models: Iterable[tuple[Mapping[Any, Any], Subject]],
    calibrated: bool = True,
) -> dict[str, pd.DataFrame]:
    """Return the tables `groups` and `shift`, by name: one row per model and group of the report split, or kind of
    examples, with the quality, and how much lower it is than that of the dense model on the same examples. `groups`
    names the group of each example. There is no `shift` without examples of another kind.

    Each model comes with the columns that identify it. The first rows are those of the dense model. If `calibrated`,
    the model's confidence in its answers is measured too: it writes them again.
    """
    kinds = {USUAL: splits.report, **splits.shifts}
    dense_model = subject.without(HeadMask(subject.grid))
    dense_outcomes = {kind: measure(dense_model, examples) for kind, examples in kinds.items()}
    rows, of_groups = [], []
    for about, model in ({"scorer": DENSE, "recovery": NOTHING, "heads_removed": 0}, dense_model), *models:
        for kind, outcome in dense_outcomes.items():
            measured = outcome if model is dense_model else measure(model, kinds[kind])
            if kind == USUAL:
                table = by_group(measured, groups, outcome)
                of_groups.append(pd.concat([pd.DataFrame(dict(about), index=table.index), table], axis=1))
            if len(kinds) > 1:
                columns = {
                    name: value for name, value in accuracy_columns(measured).items() if name.startswith(QUALITY)
                }
                drop = drop_columns("drop", measured.quality, outcome.quality)
                columns |= drop | (calibration_columns(model, kinds[kind], measured) if calibrated else {})
                rows.append({**about, "examples_of": kind, "examples": len(measured.quality), **columns})
    tables = {"groups": pd.concat(of_groups, ignore_index=True), "shift": pd.DataFrame(rows)}
    if "group" not in tables["groups"] or tables["groups"]["group"].nunique() < 2:
        del tables["groups"]
    return {name: table for name, table in tables.items() if len(table)}


@doing("other examples")
def held_out_table(study: Study, recovered: Iterable[tuple[str, HeadMask]]) -> dict[str, pd.DataFrame]:
    """Return the table `held_out`, by its name: models after recoveries, each made on the shorter half of the examples
    alone, and on as many of all lengths, drawn at random. Both are measured on the longer examples of the report split.
    If the user gave examples of one kind, it says how much of a recovery holds on examples unlike those that it read.
    There is no table if other kinds are measured, or of fewer than `PART` examples that are longer, or shorter.
    """
    read, report = study.splits.train, study.splits.report
    draw = torch.Generator().manual_seed(study.seed)
    lengths_E, order = read.lengths().cpu(), torch.randperm(len(read), generator=draw)
    longest = int(lengths_E.median())
    shorter, long = order[lengths_E[order] <= longest], report[(report.lengths() > longest).nonzero().flatten()]
    if not study.splits.alike or len(shorter) == len(read) or min(len(shorter), len(long)) < PART:
        return {}
    parts = {f"up to {longest} tokens": shorter, ALL_LENGTHS: order[: len(shorter)]}
    rows = []
    for name, mask in recovered:
        outcomes = {}
        for fitted_to, examples in parts.items():
            own = replace(study, splits=Splits(**{**study.splits.given, "train": read[examples]}))
            outcomes[fitted_to] = measure(recover(study.recoveries[name], own, study.subject.without(mask)).model, long)
        about = {"recovery": name, "heads_removed": len(mask.removed)}
        for fitted_to, outcome in outcomes.items():
            quality = {key: value for key, value in accuracy_columns(outcome).items() if key.startswith(QUALITY)}
            lost = drop_columns("lost", outcome.quality, outcomes[ALL_LENGTHS].quality)
            rows.append({**about, "fitted_to": fitted_to, "examples": len(long), **quality, **lost})
    return {"held_out": pd.DataFrame(rows)} if rows else {}


def held_out_sentences(tables: Tables) -> Iterator[str]:
    """Yield a sentence per recovery: what it keeps on longer examples than it read."""
    if "held_out" not in tables:
        return
    for (name, removed), rows in tables["held_out"].groupby(["recovery", "heads_removed"], sort=False):
        (_, short), (_, whole) = rows.iterrows()
        ends = ""
        if not isnan(short["lost_low"]):
            times, decimals, unit = (100, 1, " points") if in_percent(quality_name(tables)) else (1, 3, "")
            low, high = (plots.number(times * short[f"lost{end}"], decimals) for end in ("_low", "_high"))
            ends = f" (95 % interval of the difference {low} to {high}{unit})"
        yield (
            f"Held out by length: on the {short['examples']} longer examples the model without {removed}"
            f" {unit_name(tables)} keeps {quality_of(whole[QUALITY], tables)} after a {name} on all lengths,"
            f" {quality_of(short[QUALITY], tables)} after one on as many examples of {short['fitted_to']}{ends}."
        )


def group_sentence(tables: Tables) -> Iterator[str]:
    """Yield a sentence for the group of examples that loses most, if it loses at 95 % confidence."""
    if "groups" not in tables:
        return
    table = _smallest(tables["groups"])
    lost = table[(table["scorer"] != DENSE) & (table["drop_low"] > 0)]
    if lost.empty:
        return
    row = lost.loc[lost["drop"].idxmax()]
    dense = table[(table["scorer"] == DENSE) & (table["group"] == row["group"])][QUALITY].item()
    lowest, highest = (plots.number(row[f"drop{end}"], 2) for end in ("_low", "_high"))
    yield (
        f"Of {table['group'].nunique()} kinds of examples {row['group']} lose most ({row['examples']} of the report"
        f" split): {quality_name(tables)} {quality_of(dense, tables)} with all {unit_name(tables)},"
        f" {quality_of(row[QUALITY], tables)} {_which(row, tables)} (95 % interval of the loss {lowest} to {highest})."
    )


def shift_sentences(tables: Tables) -> Iterator[str]:
    """Yield a sentence per kind of examples: the quality with all heads, without some, and after each recovery."""
    if "shift" not in tables:
        return
    for kind, rows in _smallest(tables["shift"]).groupby("examples_of", sort=False):
        dense, *others = rows.to_dict("records")
        if kind == USUAL or not others:
            continue
        parts = ", ".join(f"{quality_of(row[QUALITY], tables)} {_which(row, tables)}" for row in others)
        whole_model = f"{quality_name(tables)} is {quality_of(dense[QUALITY], tables)} with all {unit_name(tables)}"
        yield f"On examples of another kind ({kind}) {whole_model}, {parts}."


def _smallest(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the whole model and, for each recovery, of the model with the most heads removed."""
    dense, pruned = table[table["scorer"] == DENSE], table[(table["scorer"] != DENSE) & (table["heads_removed"] > 0)]
    kind = "group" if "group" in table else "examples_of"
    most = pruned.groupby("recovery")["heads_removed"].transform("max")
    return pd.concat([dense, pruned[pruned["heads_removed"] == most].drop_duplicates(["recovery", kind])])


def _which(row: Mapping[Any, Any], tables: Tables) -> str:
    without = f"without {int(row['heads_removed'])}"
    return without if row["recovery"] == NOTHING else f"{without} after {row['recovery']}"


@needs("shift")
def shift_quality(tables: Tables) -> Plot | None:
    """Draw the quality on each kind of examples: a line per kind, a mark per model."""
    table = _smallest(tables["shift"])
    kinds, models = list(table["examples_of"].unique()), ["scorer", "recovery", "heads_removed"]
    figure = plots.new_figure(figsize=(7, 1.4 + 0.55 * len(kinds)))
    axes = figure.add_subplot()
    groups = [rows for _, rows in table.groupby(models, sort=False)]
    for i, rows in enumerate(groups):
        first = rows.iloc[0]
        label = f"all {unit_name(tables)}" if first["scorer"] == DENSE else _which(first, tables)
        look = {"color": "black", "marker": "|", "markersize": 12} if i == 0 else plots.line_style(i - 1)
        y = [kinds.index(kind) + 0.12 * (i - (len(groups) - 1) / 2) for kind in rows["examples_of"]]
        ends: Any = plots.errors(rows, QUALITY)
        axes.errorbar(rows[QUALITY], y, xerr=ends, linestyle="", capsize=2, elinewidth=1, label=label, **look)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    worst = table.loc[table["drop"].idxmax()]
    lost = f"{plots.number(worst['drop'], 3)} of {quality_name(tables)}"
    if in_percent(quality_name(tables)):
        axes.set_xlim(-0.03, 1.03)
        lost = f"{plots.number(100 * worst['drop'], 1)} points"
    axes.set_xlabel(quality_name(tables))
    axes.set_title(plots.wrapped(f"Most is lost on {worst['examples_of']}: {lost}", 6.5))
    plots.legend_above(figure, axes)
    caption = (
        f"{quality_name(tables).capitalize()} on examples of the usual kind and of other kinds, which were used neither"
        f" to train nor to choose. The {unit_name(tables)} are those that can be removed within the tolerance on the"
        " usual kind. Bars are 95 % intervals over examples."
    )
    return Plot("shift", caption, figure)
