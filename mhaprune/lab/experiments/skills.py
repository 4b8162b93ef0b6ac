"""The heads that each skill of a model needs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.experiments.base import Experiment, Findings, Setup, with_proofs
from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.heat_map import NEEDED_OR_HURT, heat_map
from mhaprune.lab.reporting.names import loss_suffix, quality_name, unit_name
from mhaprune.lab.reporting.plots import Plot, needs
from mhaprune.lab.reporting.sentences import Aside, quality_of
from mhaprune.measure.accuracy import accuracy_columns
from mhaprune.measure.outcomes import measure
from mhaprune.progress import doing
from mhaprune.pruning.pruned import EquivalenceCheck
from mhaprune.scorers.profiles import HURTS, NEEDED, OWN, SHARED, profile, told_apart
from mhaprune.scorers.scoring import Scoring
from mhaprune.tables import HEAD, KIND, QUALITY, Tables, named

SHOWN = 40
"""The largest number of heads in the figure."""


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences: how good the model is at each skill, which heads all need, and which belong to one."""
    table, heads, units = tables["profile"], _heads(tables), unit_name(tables)
    count, kinds = len(heads), table[KIND].nunique()
    right = {row[KIND]: row[QUALITY] for _, row in tables["kinds"].iterrows()}
    yield (
        f"Of {count} {units} each of the {kinds} kinds of examples surely needs {_count(heads, SHARED)}, one kind alone"
        f" {_count(heads, OWN)}; no kind surely needs {int((heads['kinds_in_need'] == 0).sum())}."
    )
    good = ", ".join(f"{kind} {quality_of(value, tables)}" for kind, value in right.items())
    yield (
        f"The model itself, {quality_name(tables)}: {good}. A kind at which it is no better than chance says nothing."
        f" Scores are by {table['scorer'].iloc[0]}."
    )
    for kind, rows in table.groupby(KIND, sort=False):
        mine = rows[rows["verdict"] == NEEDED].sort_values("score", ascending=False)
        own, hurt = mine[mine["needed_by"] == OWN], rows[rows["verdict"] == HURTS]
        first = ", ".join(map(str, named(mine.head(3)))) or "none"
        yield Aside(
            f"{kind} surely needs {len(mine)}, {len(own)} of them alone, and is hurt by {len(hurt)}. It needs most:"
            f" {first}."
        )


def _heads(tables: Tables) -> pd.DataFrame:
    return tables["profile"].drop_duplicates(HEAD)


def _count(heads: pd.DataFrame, role: str) -> int:
    return int((heads["needed_by"] == role).sum())


def headline(tables: Tables) -> list[Number]:
    """Return the numbers of heads that all kinds need, that one needs, and that hurt one."""
    heads, table = _heads(tables), tables["profile"]
    hurt = len(table[table["verdict"] == HURTS].drop_duplicates(HEAD))
    counts = {"needed by all kinds": _count(heads, SHARED), "needed by one kind": _count(heads, OWN)}
    counts["hurt a kind"] = hurt
    return [Number(f"{unit_name(tables)} {what}", n, len(heads), "", 0.0, len(heads)) for what, n in counts.items()]


@needs("profile")
def of_kinds(tables: Tables) -> Plot:
    """Draw the heads that are surely needed by a kind of examples, or hurt one, with a column for each kind."""
    table = tables["profile"]
    kinds = list(dict.fromkeys(table[KIND]))
    largest = table.groupby(KIND)["score"].transform(lambda scores: scores.abs().max())
    table = table.assign(part=np.where(table["verdict"] == "", 0.0, table["score"] / largest))
    drawn = table.pivot_table(index=HEAD, columns=KIND, values="part", sort=False)[kinds]
    if (drawn != 0).any(axis=None):
        drawn = drawn[(drawn != 0).any(axis=1)]
    drawn = drawn.loc[drawn.abs().max(axis=1).nlargest(SHOWN).index].sort_index()
    figure = plots.new_figure(figsize=(2.6 + 0.8 * len(kinds), 1.8 + 0.22 * len(drawn)))
    axes = figure.subplots()
    names = list(map(str, named(drawn.index.to_frame(index=False))))
    image = heat_map(axes, drawn.to_numpy(), rows=names, columns=kinds, cmap=NEEDED_OR_HURT, vmin=-1, vmax=1)
    axes.tick_params(axis="x", rotation=45)
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    bar.set_label("score, largest of the kind = 1")
    axes.set_title("What each kind of examples needs" if (drawn != 0).any(axis=None) else "Nothing is decided yet")
    unit = loss_suffix(tables).strip()
    caption = (
        f"The {len(drawn)} {unit_name(tables)} whose score by {table['scorer'].iloc[0]} is largest beside the largest"
        f" of a kind{f' (in {unit})' if unit else ''}. Blue: the kind needs it. Red: it hurts the kind. White is"
        f" undecided: at 95 % confidence for all {len(table)} pairs together the score may be 0."
    )
    return Plot("profile", caption, figure)


@dataclass(frozen=True)
class Skills(Experiment):
    """The heads that each kind of examples needs: tables `profile` and `kinds`. If no kinds are told apart, they are
    the short and the long examples. By default scores estimate an ablation by its derivative."""

    question = "Which heads does each skill need?"
    then = "In Python `heads.mask(keep, over='worst')` chooses heads by the kind that needs them most."
    steps = ("model", "score", "quality", "prove", "figures and page")
    seconds = (17, 1, 0.2, 0.1, 1)
    figures = (of_kinds,)
    say = staticmethod(say)
    headline = staticmethod(headline)

    def check(self, setup: Setup) -> None:
        if len(setup.scorers) != 1:
            raise ValueError(
                f"scorer=[{','.join(setup.scorers)}]: experiment=skills needs exactly one, as [attribution]"
            )

    def __call__(self, study: Study) -> Findings:
        subject, splits = study.subject, study.splits
        with doing("score"):
            table = profile(Scoring(subject, splits.score, study.seed, study.remember), study.scorers)
        with doing("quality"):
            found = measure(subject, splits.report)
        quality = pd.DataFrame(
            [
                {KIND: kind, **accuracy_columns(type(found)(*(values[rows.to(values.device)] for values in found)))}
                for kind, rows in told_apart(splits.report).items()
            ]
        )
        equivalence = EquivalenceCheck(subject, splits.proof)
        equivalence.prove(HeadMask(subject.grid).without(*subject.grid.heads[::2]))
        return with_proofs(study, {"profile": table, "kinds": quality}, equivalence.worst)
