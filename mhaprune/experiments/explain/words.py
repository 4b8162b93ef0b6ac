"""Sentences of `experiment=explain`, and its map of heads."""

from collections.abc import Iterator
from math import isnan

import pandas as pd

from mhaprune.heads import HeadId
from mhaprune.reporting.head_map import REMOVED, Verdict, prunable_alone
from mhaprune.reporting.headline import Number
from mhaprune.reporting.plots import correlation, number
from mhaprune.reporting.sentences import share
from mhaprune.tables import HEAD, QUALITY, Tables, in_unit, quality_name

SPREAD = "spreads its attention evenly over all that it may look at"
ABOVE_CHANCE = 0.15
"""... and it gets at least this share of the attention that is possible beyond chance, which is large where few keys
are allowed: 1 / (i + 1) in row i of a causal block. Voita et al. 2019, section 5.2, require 0.9 of the former and
nothing of the latter, so a weight that is largest by a hair is enough."""
NAMED = 3
"""Number of the most important heads that get a sentence each."""


def _headline(looks: pd.DataFrame, quality: str, unit: str) -> str:
    """The head that matters most, and by how much."""
    there = looks[~looks["removed"]].sort_values("rank")
    best = there.iloc[0]
    interval = f"{share(best['quality_low'])}–{share(best['quality_high'])}, 95 %"
    return (
        f"{_name(best)} matters most of {len(there)} heads by {best['scorer']}: without it the loss rises by"
        f" {number(best['loss_rise'], 3)}{unit}, and {quality} is {share(best[QUALITY])} ({interval}) on the report"
        f" split, with all heads {share(best['open_quality'])}."
    )


def say(tables: Tables) -> Iterator[str]:
    """Say which heads matter most, what they do, and what breaks without them."""
    yield _headline(tables["looks"], quality_name(tables), in_unit(tables))
    looks = tables["looks"].query("not removed").sort_values("rank")
    wrong = tables["wrong"].drop_duplicates(HEAD).set_index(HEAD) if "wrong" in tables else None
    patterns = tables["patterns"].set_index(HEAD)
    if "answer" in tables["examples"]:
        yield from _answers(tables["examples"])
    for _, head in looks.head(NAMED).iterrows():
        key = tuple(head[HEAD])
        line = f"{_name(head)} {_look(head, patterns.loc[[key]])}. Without it"
        if wrong is None:
            yield f"{line} the loss rises by {number(head['loss_rise'], 3)}{in_unit(tables)}."
            continue
        line += f" {head['turned_wrong']:.0f} of {head['examples']:.0f} examples turn wrong"
        if key in wrong.index:
            example = wrong.loc[key]
            said = _cut(example["said_without_it"] or "nothing", example["example"])
            line += f"; of {example['example']} it makes {said}"
        yield f"{line}."
    if "gates" in tables:
        yield from _gates(tables["gates"])


def head_map(tables: Tables) -> Verdict:
    """The heads that matter each on its own, with what they look at."""
    looks = tables["looks"]
    heads = looks[[*HEAD, "score", "name"]].assign(stays=~(looks["removed"] | looks["prunable"]))
    scorer = looks["scorer"].dropna().iloc[0]
    heads["name"] = heads["name"].astype(object).fillna("").mask(looks["removed"], REMOVED)
    there = ~looks["removed"]
    together = looks.loc[there, "open_quality"].iloc[0], looks["without_prunable"].iloc[0]
    verdict = prunable_alone(heads[there], scorer, looks["tolerance"].iloc[0], tables, together)
    return verdict._replace(heads=heads)  # with the tiles of heads that are gone already


def headline(tables: Tables) -> list[Number]:
    """Return the number of heads that are prunable one at a time."""
    looks = tables["looks"].query("not removed")
    return [Number("heads prunable alone", float(looks["prunable"].sum()), len(looks), "", 0.0, len(looks))]


def over_runs(tables: Tables) -> Iterator[str]:
    """Over the runs of each task: what the head looks at that matters most."""
    looks = tables["looks"]
    for task, rows in looks[~looks["removed"].astype(bool)].groupby("task", sort=False):
        best = rows.sort_values("rank", kind="stable").drop_duplicates("label")
        if len(best) > 1:
            names = (
                best["name"].astype(object).fillna("no clear pattern").replace("", "no clear pattern").value_counts()
            )
            counts = ", ".join(f"“{name}” in {count}" for name, count in names.items())
            without = " ".join(map(share, best[QUALITY]))
            line = f"Over {len(best)} runs on {task} the head that matters most follows {counts}"
            yield f"{line}; exact match without it: {without}."


def _answers(examples: pd.DataFrame) -> Iterator[str]:
    for example in examples.itertuples():
        known = isinstance(example.right_answer, str)
        verdict = "right" if example.answer == example.right_answer else f"wrong, it is {example.right_answer}"
        answer = _cut(example.answer, example.source)
        line = f"Asked {example.source} the model says {answer} ({verdict if known else 'no answer is known'})."
        if not example.ended:
            line += " It finds no end."
        if example.symbols > example.trained_symbols:
            line += (
                f" It was never trained on more than {example.trained_symbols} symbols, these are {example.symbols}."
            )
        yield line


def _cut(answer: str, example: str) -> str:
    """Return an answer with “…” after eight symbols if it is much longer than the source of the example."""
    if len(answer) <= max(16, 4 + len(example.partition("->")[0])):
        return answer
    blank = " " if " " in answer else ""
    return f"{blank.join((answer.split() if blank else answer)[:8])}{blank}…"


def _gates(gates: pd.DataFrame) -> Iterator[str]:
    own = gates.iloc[0]["spearman_with_ablation"]
    if not isnan(own):
        yield f"The learned gates rank the heads like ablation at ρ = {correlation(own)} (Spearman)."
    for again in gates[gates["gates"].str.startswith("retrained")].itertuples():
        start = correlation(again.spearman_with_start)
        line = f"With the whole model {again.gates}, its gates are at ρ = {start} with where they started"
        if not isnan(again.spearman_with_ablation):
            line += f" and at {correlation(again.spearman_with_ablation)} with the ablation of its own heads"
        yield f"{line}."


def _name(head: pd.Series) -> HeadId:
    return HeadId(*head[HEAD])


def _look(head: pd.Series, patterns: pd.DataFrame) -> str:
    if not isinstance(head["name"], str) or not head["name"]:
        return "follows no clear pattern"
    rows = patterns[patterns["meaning"] == head["name"]]
    if rows.empty:
        return SPREAD
    mass, largest, chance = (f"{100 * part:.0f} %" for part in rows.iloc[0][["mass", "largest", "chance"]])
    return (
        f"follows “{head['name']}”: its largest weight is there in {largest} of the rows that have such a place, with"
        f" {mass} of its attention ({chance} by chance)"
    )
