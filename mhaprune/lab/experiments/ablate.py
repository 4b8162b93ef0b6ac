"""Score every head, remove the weakest heads from the model, and measure the cost and the speed-up."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import pandas as pd

from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.experiments.base import Findings, HeadBudgets, Setup, WithinTolerance, the_one, with_proofs
from mhaprune.lab.experiments.shift import (
    group_sentence,
    groups_of,
    held_out_sentences,
    held_out_table,
    shift_quality,
    shift_sentences,
    shift_table,
)
from mhaprune.lab.experiments.tolerance import (
    caveats,
    count_words,
    most_removed,
    numbers_of_summary,
    of_whole,
    removable,
    summary_of,
    surely_words,
)
from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.agreement import rank_agreement
from mhaprune.lab.reporting.head_map import Verdict
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.names import in_brackets, in_percent, quality_name, timed_name, unit_name
from mhaprune.lab.reporting.plots import CONTROL_COLOUR, Plot, appendix, needs
from mhaprune.lab.reporting.sentences import Aside, as_fast, quality_of, right, within_noise
from mhaprune.lab.reporting.shared_figures import agreement
from mhaprune.lab.reporting.training_curves import training_curve
from mhaprune.measure.accuracy import choose_columns, size_columns, worst_columns
from mhaprune.measure.outcomes import measure
from mhaprune.progress import doing, track
from mhaprune.pruning.plans import Plan, choices, plan_columns, plan_words, plans_of, removed_names
from mhaprune.pruning.pruned import prune, time_removed
from mhaprune.recoveries.base import recover
from mhaprune.scorers.scoring import Scoring, heads_table
from mhaprune.statistics.intervals import skewed_ends
from mhaprune.subject import Subject
from mhaprune.tables import (
    DENSE_AGAIN,
    HEAD,
    KIND,
    MOMENTS,
    NOTHING,
    QUALITY,
    QUARTILES,
    REFERENCE,
    SURE,
    Tables,
    by_block,
    candidates,
    head_names,
    named,
    repeated_draws,
)


def say_ablation(tables: Tables) -> Iterator[str]:
    """Yield sentences: how many heads can be removed, the speed-up, which heads, and what is uncertain."""
    summary, units = tables["summary"], unit_name(tables)
    plain = summary["recovery"] == NOTHING
    recovered, best = summary[~plain].to_dict("records"), most_removed(summary[plain]).to_dict()
    total, dense = int(best["heads_total"]), best["dense_quality"]
    rows = [best, *recovered]
    if not best["heads_removed"]:  # then a recovery may be the answer
        rows.sort(key=lambda row: -row["heads_removed"])
    first, *others = rows
    if first["heads_removed"] > 0:
        after = "" if first is best else f" after {first['recovery']}"
        yield (
            f"{removable(first['heads_removed'], total, tables)} can be removed{after}:"
            f" {right(first[QUALITY], tables, 'still ')} ({of_whole(first, tables)})."
        )
        if surely_words(first, tables):
            yield f"At 95 % confidence {count_words(first[SURE], tables)} can be removed{after}."
        yield as_fast(first, tables)
    if not best["heads_removed"]:
        without = removable(0, total, tables)
        if first is not best:
            without = f"Without {first['recovery']} {without[0].lower()}{without[1:]}"
        yield (
            f"{without} can be removed within {best['tolerance']:g} of the whole model's {quality_name(tables)}"
            f" ({quality_of(dense, tables)})."
        )
    for row in others:
        if row is not best and row["heads_removed"]:
            beside = f" ({of_whole(row, tables)})" if KIND in row else ""  # another kind may lose most here
            yield (
                f"After {row['recovery']} {int(row['heads_removed'])} can be removed{_surely(row, tables)}:"
                f" {right(row[QUALITY], tables)}{beside}. {as_fast(row, tables)}"
            )
        elif row is not best:
            yield f"After {row['recovery']} {count_words(0, tables)} can be removed."
    for row in rows:
        if row["heads_removed"]:
            yield Aside(_which(row, units))
    yield from group_sentence(tables)
    yield from shift_sentences(tables)
    yield from held_out_sentences(tables)
    sure = any(surely_words(row, tables) for row in rows if row["heads_removed"])
    yield from caveats(tables, best, sure, "recovered")


def _surely(row: Mapping[str, Any], tables: Tables) -> str:
    """Return ` (12 at 95 % confidence)`; empty if not known."""
    words = surely_words(row, tables)
    return f" ({words})" if words else ""


def _which(row: dict[Any, Any], units: str) -> str:
    """Return a sentence that names the removed heads."""
    names, after = by_block(head_names(row["removed"])), row["recovery"]
    which = "" if after == NOTHING else f" before {after}"
    return f"The {units} removed{which}, as chosen by {row['scorer']} (site.layer: {units}, counted from 0): {names}."


def map_of_heads(tables: Tables) -> Verdict:
    """Return the map of the largest set of heads that can be removed together."""
    summary = tables["summary"]
    best = most_removed(summary.query("recovery == @NOTHING"))
    if not best["heads_removed"]:
        best = most_removed(summary)
    scores = tables["heads"][tables["heads"]["draw"] == 0]
    scorer = REFERENCE if REFERENCE in set(scores["scorer"]) else best["scorer"]
    rows = scores[scores["scorer"] == scorer]
    if rows.empty:  # chosen by a schedule that needs no scorer
        rows = scores.drop_duplicates(HEAD).assign(score=nan)
    heads = rows[[*HEAD, "score"]].assign(name="")
    gone = set(head_names(best["removed"]))
    heads["stays"] = [head not in gone for head in named(heads)]
    units = unit_name(tables)
    after = "" if best["recovery"] == NOTHING else f", then {best['recovery']}"
    title = f"{len(gone)} of {len(heads)} {units} removed{after}: {right(best[QUALITY], tables)}"
    if not gone:
        title = f"{removable(0, len(heads), tables)} can be removed"
    low_N, high_N = skewed_ends(rows.reindex(columns=MOMENTS).to_numpy(dtype=float).T)
    heads["faint"] = ((low_N <= 0) & (high_N >= 0)) | (heads["score"] == 0)  # of equal scores there is no interval
    meaning = f"Dashed tiles are {units} that were removed together, as chosen by {best['scorer']}; the others stay."
    if heads.loc[heads["stays"], "faint"].any():
        meaning += " Grey tiles are within their 95 % interval of 0."
    if not gone:
        meaning = meaning.partition(";")[2]
    named_scorer = "" if heads["score"].isna().all() else scorer
    return Verdict(heads, named_scorer, title, meaning, tables=("summary", "heads"), unit=in_brackets(tables))


def numbers(tables: Tables) -> list[Number]:
    """Return three numbers, without recovery and after each recovery: heads that can be removed, quality, speed-up."""
    return numbers_of_summary(tables["summary"], tables)


@needs("pruning", "summary")
def accuracy_curves(tables: Tables) -> Plot:
    """Draw the quality against the number of removed heads: a line per scorer, and a band for a random control."""
    by_kind, quality = KIND in tables["pruning"], quality_name(tables)
    pruning = plots.beside_whole(tables["pruning"], by_kind)
    names = candidates(pruning)
    figure = plots.new_figure(figsize=(7, 4.6))
    axes = figure.add_subplot()
    for i, name in enumerate(names):
        curve = pruning[pruning["scorer"] == name]
        plots.draw_curve(axes, curve, "heads_removed", label=name, markersize=5, **plots.line_style(i))
    for name in repeated_draws(pruning):
        curves = pruning[pruning["scorer"] == name]
        label = f"{name} (mean and range of {curves['draw'].nunique()})"
        plots.draw_band(axes, curves, linestyle="--", label=label)
    recovered = tables.get("recovered", pd.DataFrame(columns=["recovery", "scorer"]))
    recovered = plots.beside_whole(recovered, by_kind and len(recovered) > 0)
    for i, ((name, scorer), curve) in enumerate(recovered.groupby(["recovery", "scorer"], sort=False)):
        look = plots.line_style(names.index(scorer)) if scorer in names else {"color": CONTROL_COLOUR, "marker": "x"}
        look |= {"linestyle": ("--", ":", "-.")[i % 3], "markerfacecolor": "none", "markersize": 7}
        plots.draw_curve(axes, curve, "heads_removed", label=f"{scorer}, then {name}", **look)
    units, rows = unit_name(tables), [most_removed(own) for _, own in tables["summary"].groupby("recovery", sort=False)]
    plots.mark_choice(axes, plots.beside_whole(pd.DataFrame(rows), by_kind))
    label = f"change of {quality}, worst kind" if by_kind else quality
    axes.set(xlabel=f"{unit_name(tables)} removed, of {int(pruning['heads_total'].max())}", ylabel=label)
    if in_percent(quality) and not by_kind:
        axes.set_ylim(-0.03, 1.03)
    axes.set_xticks(sorted(pruning["heads_removed"].unique()))
    within = f"can be removed within {rows[0]['tolerance']:g} of {quality}"
    title = f"{removable(rows[0]['heads_removed'], int(rows[0]['heads_total']), tables)} {within}"
    parts = [
        title,
        *(
            f"{count_words(row['heads_removed'], tables)} after {plots.elided(str(row['recovery']))}"
            for row in rows[1:]
        ),
    ]
    axes.set_title(plots.wrapped(", ".join(parts), 6.5))
    plots.legend_above(figure, axes)
    caption = (
        f"{quality.capitalize()} on the report split without the {units} that each score ranks lowest. Bars"
        " are 95 % intervals over examples. Dashed with open marks: the same removed, and what is left recovered."
        f" Rings: the most that loses at most {rows[0]['tolerance']:g} on the choose split (dotted: here)."
    )
    if by_kind:
        caption += " Each mark is beside the whole model on the kind of examples that loses most there."
    return Plot("accuracy", caption, figure)


@needs("pruning", "latency", "summary")
def latency_curves(tables: Tables) -> Plot | None:
    """Draw the speed-up over the whole model against heads removed: a line for the scorer of the summary, small marks
    for the others, which would lie on it, because time depends on the number of heads more than on which they are."""
    pruning = tables["pruning"]
    pruning = pruning[pruning["scorer"].isin(candidates(pruning))].dropna(subset="speedup")  # not one draw of a control
    if pruning.empty:
        return None
    best = most_removed(tables["summary"])
    first = best["scorer"] if best["scorer"] in set(pruning["scorer"]) else pruning["scorer"].iloc[0]
    figure = plots.new_figure(figsize=(7, 4.2))
    axes = figure.add_subplot()
    floor = tables["latency"].set_index("scorer").loc[DENSE_AGAIN, ["speedup_q1", "speedup_q3"]]
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhspan(*floor, color=CONTROL_COLOUR, alpha=0.25, linewidth=0, label="noise: the whole model against itself")
    curve, others = pruning[pruning["scorer"] == first], pruning[pruning["scorer"] != first].query("heads_removed > 0")
    look: Any = {"label": f"chosen by {first}", **plots.line_style(0)}
    plots.draw_curve(axes, curve, "heads_removed", "speedup", QUARTILES, **look)
    if len(others):
        look = {"color": "#555555", "markersize": 5, "label": "by another score"}
        axes.plot(others["heads_removed"], others["speedup"], "x", **look)
    units, total = unit_name(tables), int(pruning["heads_total"].max())
    axes.set(xlabel=f"{units} removed, of {total}", ylabel="times as fast (logarithmic axis)")
    axes.set_xticks(sorted(pruning["heads_removed"].unique()))
    seen = pd.concat([others["speedup"], *(curve[f"speedup{end}"] for end in QUARTILES), pd.Series([1.0, *floor])])
    plots.scale_in_ratios(axes.yaxis, 0.95 * seen.min(), 1.05 * seen.max(), 0.05)
    marked: dict[float, tuple[pd.Series, str]] = {}
    for recovery, rows in tables["summary"].query("heads_removed > 0").groupby("recovery", sort=False):
        marked.setdefault((row := most_removed(rows))["heads_removed"], (row, str(recovery)))
    for row, recovery in marked.values():
        words = f"{row['speedup']:.2f} times{'' if recovery == NOTHING else f', {recovery}'}"
        side: Any = {"ha": "right", "va": "bottom"} if row["heads_removed"] > 0.8 * total else {"va": "top"}
        where = (-4, 6) if "ha" in side else (5, -5)
        look = {"textcoords": "offset points", "fontweight": "bold", **side}
        axes.annotate(words, (row["heads_removed"], row["speedup"]), where, **look)
    gains = []
    for row, recovery in marked.values():
        without = f"without {int(row['heads_removed'])}{f' {units}' if recovery == NOTHING else f' after {recovery}'}"
        noise = " (within the noise)" if within_noise(row, *floor) else ""
        gains.append(f"{row['speedup']:.2f} {without}{noise}")
    plots.legend_above(figure, axes, f"Times as fast: {', '.join(gains)}" if gains else "")
    caption = (
        f"How many times as fast {timed_name(tables)} is with {units} really removed. Bars are quartiles over rounds in"
        " which all models take turns; within the grey strip there is no difference to be seen. Numbers stand at the"
        f" most that can be removed within {best['tolerance']:g} of {quality_name(tables)}."
    )
    return Plot("latency", caption, figure)


@dataclass(frozen=True)
class Ablate(HeadBudgets, WithinTolerance):
    """Scorers × budgets: tables `summary`, `heads`, `pruning`, `agreement`, `latency` and `training`; and
    `recovered`, models after a recovery (by default a refit).

    For every scorer, `summary` has the pruned model with the most heads removed that loses at most `tolerance` of exact
    match on the *choose* split, and its exact match on the *report* split. `heads_removed_sure` heads can be removed at
    95 % confidence (`tolerance.py`). The first draw of a random scorer is treated like any other scorer. Its further
    draws are a control: only their accuracy is measured. A schedule that uses no scorer has a row under its own name.

    `groups` has the models of the summary on each kind of the usual examples, for example each length, and `shift` on
    examples of other kinds, if the task or `shift` has any. If there are none, `held_out` says what a refit to the
    shorter half of the examples keeps on the longer ones.

    Only the models of one scorer are recovered, because a recovery takes longer than a measurement: the scorer that can
    remove the most heads without a recovery. Recovered models have rows of their own in the summary.
    """

    calibrated: bool = False
    """Whether the confidence of the models in their answers is measured on examples of other kinds. For this a model
    writes its wrong answers again."""

    recovers = measures_shift = True
    question = "Which heads can be removed, and what does that bring?"
    then = (
        "`experiment=explain` shows what the heads look at; `experiment=prune` looks for still"
        " smaller models and saves them."
    )
    steps = ("model", "score", "prune", "time", "recover", "other examples", "prove", "figures and page")
    seconds = (18, 1, 6.5, 5, 4, 0.7, 0.1, 2)
    figures = (accuracy_curves, agreement, latency_curves, shift_quality, appendix(training_curve))
    say = staticmethod(say_ablation)
    headline = staticmethod(numbers)
    head_map = staticmethod(map_of_heads)

    def check(self, setup: Setup) -> None:
        the_one(setup.schedules)
        super().check(setup)
        setup.check_scorers()
        if others := [name for name, recovery in setup.recoveries.items() if not recovery.follows]:
            raise ValueError(
                f"recovery=[{','.join(others)}]: experiment=ablate recovers models that have lost all their heads at"
                " once, and has no control; experiment=prune has these recoveries"
            )

    def __call__(self, study: Study) -> Findings:
        subject, splits, schedule = study.subject, study.splits, the_one(study.schedules)
        scoring = Scoring(subject, splits.score, study.seed, study.remember)
        with doing("score"):
            plans = plans_of(choices(scoring, study.scorers, schedule, self.removals(subject.grid)))
            heads = heads_table(scoring, study.scorers)
        with doing("prune"):
            pruning, _, difference = prune(subject, plans, splits)
        first, batch = [plan for plan in plans if plan.draw == 0], splits.report.first(self.latency_batch)
        with doing("time"):
            latency = time_removed(subject, first, batch, self.latency_rounds)
        pruning = with_times(pruning, latency)
        furthest = most_removed(summary_table(pruning, self.tolerance))["scorer"]
        chosen = [plan for plan in first if plan.scorer == furthest]
        recovered = recovered_table(study, chosen)
        curves = [pruning]
        if len(recovered):
            recovered = with_times(recovered, latency)
            curves += [rows for _, rows in recovered.groupby("recovery", sort=False)]
        summary = pd.concat([summary_table(curve, self.tolerance) for curve in curves], ignore_index=True)
        tables = {
            "summary": summary,
            "heads": heads,
            "pruning": pruning,
            **({"recovered": recovered} if len(recovered) else {}),
            "agreement": rank_agreement(heads),
            "latency": latency,
            **study.training_table,
            **shift_table(
                *(subject, splits, groups_of(study)),
                removed_most(study, chosen, summary[summary["scorer"] == furthest]),
                self.calibrated,
            ),
            **held_out_table(study, quickly_recovered(study, chosen, summary)),
        }
        return with_proofs(study, tables, difference)


def recovered_table(study: Study, plans: Sequence[Plan]) -> pd.DataFrame:
    """Prune by each plan and recover the model. Return rows as in `pruning`. The dense model is not recovered."""
    subject, splits = study.subject, study.splits
    rows = list[dict[str, Any]]()
    whole = subject.without(HeadMask(subject.grid))
    dense, reported = (measure(whole, split) for split in (splits.choose, splits.report))
    for name, recovery in track(study.recoveries.items(), "recover"):
        for plan in track(sorted(plans, key=lambda plan: len(plan.mask.removed)), name, name=plan_words):
            pruned, note = subject.without(plan.mask), ""
            if plan.mask.removed:
                pruned, _, note, _ = recover(recovery, study, pruned)
            columns = plan_columns(plan) | {"recovery": name}
            columns |= worst_columns(measure(pruned, splits.report), reported, splits.report)
            columns |= choose_columns(measure(pruned, splits.choose), dense, splits.choose)
            rows.append(columns | size_columns(pruned, splits.report) | {"note": note})
    return pd.DataFrame(rows)


def removed_most(
    study: Study, plans: Sequence[Plan], summary: pd.DataFrame
) -> Iterator[tuple[dict[Any, Any], Subject]]:
    """Yield the model of each row of a summary, with the columns that identify it."""
    by_names = {removed_names(plan.mask): plan.mask for plan in plans}
    for row in summary[["scorer", "recovery", "heads_removed", "removed"]].to_dict("records"):
        model, name = study.subject.without(by_names[row.pop("removed") or ""]), row["recovery"]
        if name != NOTHING and row["heads_removed"]:
            model = recover(study.recoveries[name], study, model).model
        yield row, model


def quickly_recovered(study: Study, plans: Sequence[Plan], summary: pd.DataFrame) -> Iterator[tuple[str, HeadMask]]:
    """Yield the name and the mask of each row of a summary with a recovery that takes only seconds."""
    by_names = {removed_names(plan.mask): plan.mask for plan in plans}
    for row in summary[(summary["recovery"] != NOTHING) & (summary["heads_removed"] > 0)].to_dict("records"):
        if not study.recoveries[row["recovery"]].kept:
            yield row["recovery"], by_names[row["removed"]]


def with_times(table: pd.DataFrame, latency: pd.DataFrame) -> pd.DataFrame:
    """Add the measured times to the table; NaN for models that were not timed."""
    return table.merge(latency, how="left", on=[name for name in latency if name in table])


def summary_table(pruning: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """Return a row per scorer: the smallest model that loses at most `tolerance` of quality. Only draw 0 counts."""
    rows = []
    for name, curve in pruning[pruning["draw"] == 0].groupby("scorer", sort=False):
        dense = curve[curve["heads_removed"] == 0].iloc[0]
        recovery = curve["recovery"].iloc[0] if "recovery" in curve else NOTHING
        rows.append({"scorer": name, "recovery": recovery, **summary_of(curve, dense, tolerance)})
    return pd.DataFrame(rows)
