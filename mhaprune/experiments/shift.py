"""The table `shift`: pruned models on examples of another kind than those that heads were scored and chosen on."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from mhaprune.data import Data, Splits
from mhaprune.heads import HeadMask
from mhaprune.measure.columns import accuracy_columns, calibration_columns, drop_columns
from mhaprune.measure.outcomes import measure
from mhaprune.reporting import plots
from mhaprune.reporting.plots import Plot, needs
from mhaprune.reporting.sentences import share
from mhaprune.subject import Subject
from mhaprune.tables import DENSE, NOTHING, QUALITY, USUAL, Tables, quality_name, unit_name


def shift_table(
    subject: Subject,
    splits: Splits[Data],
    models: Iterable[tuple[Mapping[Any, Any], Subject]],
    calibrated: bool = True,
) -> dict[str, pd.DataFrame]:
    """Return the table `shift`, by its name: one row per model and kind of examples, with the quality, and how much
    lower it is than that of the dense model on the same examples. No table without shifts.

    Each model comes with the columns that identify it. The first rows are those of the dense model. If `calibrated`,
    the model's confidence in its answers is measured too: it writes them again.
    """
    kinds = {USUAL: splits.report, **splits.shifts}
    if len(kinds) == 1:
        return {}
    dense_model = subject.without(HeadMask(subject.grid))
    dense_outcomes = {kind: measure(dense_model, examples) for kind, examples in kinds.items()}
    rows = []
    for about, model in ({"scorer": DENSE, "recovery": NOTHING, "heads_removed": 0}, dense_model), *models:
        for kind, outcome in dense_outcomes.items():
            measured = outcome if model is dense_model else measure(model, kinds[kind])
            columns = {name: value for name, value in accuracy_columns(measured).items() if name.startswith(QUALITY)}
            drop = drop_columns("drop", measured, outcome)
            columns |= drop | (calibration_columns(model, kinds[kind], measured) if calibrated else {})
            rows.append({**about, "examples_of": kind, "examples": len(measured.quality), **columns})
    return {"shift": pd.DataFrame(rows)}


def shift_sentences(tables: Tables) -> Iterator[str]:
    """Yield a sentence per kind of examples: the quality with all heads, without some, and after each recovery."""
    if "shift" not in tables:
        return
    for kind, rows in _smallest(tables["shift"]).groupby("examples_of", sort=False):
        dense, *others = rows.to_dict("records")
        if kind == USUAL or not others:
            continue
        parts = ", ".join(f"{share(row[QUALITY])} {_which(row, tables)}" for row in others)
        whole_model = f"{quality_name(tables)} is {share(dense[QUALITY])} with all {unit_name(tables)}"
        yield f"On examples of another kind ({kind}) {whole_model}, {parts}."


def _smallest(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the whole model and, for each recovery, of the model with the most heads removed."""
    dense, pruned = table[table["scorer"] == DENSE], table[(table["scorer"] != DENSE) & (table["heads_removed"] > 0)]
    most = pruned.groupby("recovery")["heads_removed"].transform("max")
    return pd.concat([dense, pruned[pruned["heads_removed"] == most].drop_duplicates(["recovery", "examples_of"])])


def _which(row: Mapping[Any, Any], tables: Tables) -> str:
    without = f"without {int(row['heads_removed'])}"
    return without if row["recovery"] == NOTHING else f"{without} after {row['recovery']}"


@needs("shift")
def shift_quality(tables: Tables) -> Plot | None:
    """Draw the quality on each kind of examples: a line per kind, a mark per model."""
    table = _smallest(tables["shift"])
    kinds, models = list(table["examples_of"].unique()), ["scorer", "recovery", "heads_removed"]
    figure = Figure(figsize=(7, 1.4 + 0.55 * len(kinds)))
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
    if table[QUALITY].between(0, 1).all():  # a share
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
