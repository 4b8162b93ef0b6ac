"""Close the heads two at a time, and compare the cost with the sum of closing each alone.

Dimensions: E = examples of the report split, N = all heads, P = pairs of them, M = masks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mhaprune.data import Data
from mhaprune.heads import HeadId, HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.experiments.base import Experiment, Findings, Setup, the_one, with_proofs
from mhaprune.lab.model.sites import head_label
from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.heat_map import MISSING, heat_map
from mhaprune.lab.reporting.names import in_brackets, loss_suffix, quality_name
from mhaprune.lab.reporting.plots import Plot, amount, needs, number, wrapped
from mhaprune.measure.outcomes import BATCH_SIZE, measure_removed
from mhaprune.progress import doing, track
from mhaprune.pruning.plans import Plan, choices, plan_columns, plan_words, plans_of
from mhaprune.pruning.pruned import EquivalenceCheck
from mhaprune.scorers.scoring import Scoring, head_columns
from mhaprune.settings.ranges import Ge
from mhaprune.statistics.intervals import CONFIDENCE, holm, moments, p_below, with_interval
from mhaprune.subject import Subject
from mhaprune.tables import HEAD, LOSS_RISE, QUALITY, Tables, named

EXTRA_COST = "RdBu_r"
"""A colour map: red costs more than expected, blue less."""
OTHER_HEAD = [f"other_{column}" for column in HEAD]
"""The columns that name the second head of a pair."""
INTERACTION = "interaction"
"""The column with the cost of closing two heads together, minus the costs of closing each of them alone, in nats."""
STAND_IN, TOGETHER, BROKEN, NEITHER = "can replace each other", "work together", "one breaks the model", "neither"
"""The values of the column `kind`; `NEITHER` if the interaction is small or not sure."""
LARGEST = 10.0
"""Largest size of the matrix in inches. With more heads than fit, cells shrink and lose their numbers."""
CELL = 0.44
"""The size of a cell with a number, in inches."""
SMALL = 0.01
"""The axis of the rise of the loss is in proportion up to this number, and logarithmic beyond."""


def say_interactions(tables: Tables) -> Iterator[str]:
    """Yield sentences: the pair whose heads replace each other best, the pair that works together most, the number of
    pairs of each kind, and the cost of removing many heads together."""
    pairs, unit = tables["pairs"], loss_suffix(tables)
    alone = dict(zip(named(tables["alone"]), tables["alone"][LOSS_RISE], strict=True))
    for what, sign in ((STAND_IN, 1), (TOGETHER, -1)):
        helped = [min(alone[a], alone[b]) < 0 for a, b in zip(named(pairs), other_heads(pairs), strict=True)]
        rows = pairs[(pairs["kind"] == what) & ~np.array(helped, dtype=bool)]  # closing a harmful head is no loss
        rows = rows.loc[(sign * rows[INTERACTION]).nlargest(1).index]
        for first, second, both in zip(named(rows), other_heads(rows), rows[LOSS_RISE], strict=True):
            yield (
                f"{first} and {second} {what} most: alone they cost {alone[first]:.3f} and"
                f" {alone[second]:.3f}{unit} on the report split, together {both:.3f}."
            )
    count = pairs["kind"].value_counts()
    more, less, full = (int(count.get(kind, 0)) for kind in (STAND_IN, TOGETHER, BROKEN))
    yield (
        f"Pairs of heads that {STAND_IN}: {more or 'none'} of {len(pairs)}. Together they cost at least"
        f" {pairs['tolerance'].iloc[0]:g}{unit} more than the sum of both alone, at 95 % confidence for all pairs"
        f" together. Pairs that {TOGETHER}, and so cost as much less: {less or 'none'}."
    )
    if full:
        half = "half of the answers" if quality_name(tables) == "exact match" else f"half of {quality_name(tables)}"
        yield f"{full} pair{'s' * (full > 1)} cannot be judged: one of the two heads alone already spoils {half}."
    for scorer, rows in tables["together"].groupby("scorer", sort=False):
        half = half_of(rows)
        yield (
            f"The {half['heads_removed']} heads that go first by {scorer} cost {half['expected_alone']:.3f}{unit} by"
            f" the sum of what each costs alone, and {half[LOSS_RISE]:.3f} when all of them are gone; with the"
            f" interactions of their pairs one expects {half['expected_pairs']:.3f}."
        )


def signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value, 2)


def half_of(rows: pd.DataFrame) -> pd.Series:
    """Return the row with at most half of the heads removed."""
    return rows[rows["heads_removed"] <= rows["heads_total"] / 2].iloc[-1]


def numbers_of_pairs(tables: Tables) -> list[Number]:
    """Return the numbers of pairs that can replace each other and that work together."""
    kinds = tables["pairs"]["kind"]
    return [
        Number(f"pairs of heads that {kind}", float((kinds == kind).sum()), len(kinds), "", 0.0, len(kinds))
        for kind in (STAND_IN, TOGETHER)
    ]


def other_heads(pairs: pd.DataFrame) -> list[HeadId]:
    """Return the second head of each pair."""
    return named(pairs[OTHER_HEAD].set_axis(HEAD, axis=1))


@needs("pairs", "alone")
def interactions(tables: Tables) -> Plot | None:
    """Draw the interaction of each pair of heads whose interaction is large and sure, as a triangle with a row and a
    column for each head that has one."""
    pairs, tolerance = tables["pairs"], f"{tables['pairs']['tolerance'].iloc[0]:g}{loss_suffix(tables)}"
    sure = pairs[pairs["kind"].isin((STAND_IN, TOGETHER))]
    involved = {*named(sure), *other_heads(sure)}
    heads = [head for head in named(tables["alone"]) if head in involved]
    if not heads:
        return None
    place, values = {head: i for i, head in enumerate(heads)}, np.full((len(heads), len(heads)), np.nan)
    full = np.zeros(values.shape, dtype=bool)
    for a, b, cost, kind in zip(named(pairs), other_heads(pairs), pairs[INTERACTION], pairs["kind"], strict=True):
        if {a, b} <= involved:
            column, row = sorted((place[a], place[b]))
            values[row, column], full[row, column] = cost if kind in (STAND_IN, TOGETHER) else np.nan, kind == BROKEN
    some = ~np.isnan(values) | full
    rows, columns = some.any(axis=1), some.any(axis=0)  # a triangle without its empty rows and columns
    values, full = values[rows][:, columns], full[rows][:, columns]
    cell = min(CELL, LARGEST / len(heads))
    figure = Figure(figsize=(3.8 + cell * values.shape[1], max(2.6 + cell * values.shape[0], 4.0)))
    axes = figure.add_subplot()
    top = float(np.nanmax(np.abs(values)))
    norm = FuncNorm((lambda x: np.sign(x) * np.abs(x) ** 0.5, lambda x: np.sign(x) * x**2), -top, top)
    names: Any = {
        which: [head_label(head) for head, is_shown in zip(heads, shown, strict=True) if is_shown]
        for which, shown in (("rows", rows), ("columns", columns))
    }
    write = signed if cell == CELL else None
    image = heat_map(axes, values, **names, cmap=EXTRA_COST, norm=norm, aspect="equal", write=write)
    axes.set_facecolor("white")
    for row, column in np.argwhere(full):
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=MISSING, edgecolor="white"))
    axes.tick_params(length=0, labelsize=9)
    axes.tick_params(axis="x", rotation=90)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(
        image, ax=axes, shrink=0.8, ticks=[-top, -top / 4, 0, top / 4, top], format=lambda value, _: signed(value)
    )
    bar.set_label(f"cost together beyond the sum{in_brackets(tables)}")
    counts = (f"that {kind}: {int((pairs['kind'] == kind).sum())}" for kind in (STAND_IN, TOGETHER))
    figure.suptitle(wrapped(f"Pairs of heads {', '.join(counts)}", figure.get_figwidth() - 1))
    caption = (
        "What two heads cost together beyond the sum of what each costs alone, in loss on the report split. Only pairs"
        f" beyond {tolerance} are shown, at 95 % confidence for all pairs together, and heads that have such a pair."
        " Red: they can replace each other, and closing both costs more. Blue: they work together, and each is worth"
        " less without the other. Grey is saturation: one of them alone already leaves at most half of"
        f" {quality_name(tables)}, so the loss cannot rise much more."
    )
    return Plot("interactions", caption, figure)


@needs("together")
def together(tables: Tables) -> Plot:
    """Draw the measured rise of the loss when heads are removed together, and the expected rise: a panel per scorer."""
    table = tables["together"]
    scorers = list(table["scorer"].unique())
    labels = f"heads removed, of {int(table['heads_total'].max())}", f"rise of the loss{in_brackets(tables)}"
    figure, grid = plots.panelled(len(scorers), 2, (4.6, 3.3), (1.6, 0.6), *labels, sharey=True)
    for axes, scorer in zip(grid, scorers, strict=True):
        rows = table[table["scorer"] == scorer].sort_values("heads_removed")
        removed = rows["heads_removed"]
        what = {"expected_alone": "sum of each alone", "expected_pairs": "sum with pairs"}
        for i, (column, name) in enumerate(what.items()):
            axes.plot(removed, rows[column], linestyle="--", markersize=3.5, label=name, **plots.line_style(i))
        measured: Any = {"color": "black", "marker": "o", "markersize": 3.5, "label": "measured"}
        plots.draw_curve(axes, rows, "heads_removed", LOSS_RISE, **measured)
        axes.set_yscale("symlog", linthresh=SMALL)
        plots.plain_ticks(axes.yaxis)
        half = half_of(rows)
        cost = f"{amount(half[LOSS_RISE])}{loss_suffix(tables)} together, {amount(half['expected_alone'])} one by one"
        axes.set_title(wrapped(f"{half['heads_removed']} heads, in the order of {scorer}, cost {cost}", 4.4))
    plots.legend_above(figure, grid[0])
    caption = (
        "The rise of the loss on the report split as heads go together, and what one expects of it: the sum of what"
        " each head costs alone, and that sum with the interactions of all pairs added. Bars are 95 % intervals over"
        f" examples; the axis is in proportion up to {SMALL:g}{loss_suffix(tables)} and logarithmic beyond."
    )
    return Plot("together", caption, figure)


@dataclass(frozen=True)
class Interact(Experiment):
    """The cost of two heads together beyond what each costs alone: tables `alone`, `pairs` and `together`.

    The interaction of heads i and j is the second difference of the loss, ℓ(ij) − ℓ(i) − ℓ(j) + ℓ, where ℓ(S) is the
    loss with the heads S closed. Above 0 they can replace each other: closing one costs little while the other is
    open. Below 0 they work together: without one, the other is worth less. A pair is counted if its interaction is at
    least `tolerance_nats` in size and differs from 0 at 95 % confidence for all pairs together. If one head alone
    breaks the model, a negative interaction is no sign of working together, so such a pair has its own kind.

    `together` has the cost of removing many heads at once, in the order of each scorer, and the cost expected from
    single heads and from pairs.
    """

    tolerance_nats: Annotated[float, Ge(0)] = 0.01
    """The smallest interaction (in size) that is counted, in nats of mean loss."""

    question = "Which heads can replace each other?"
    then = (
        "`experiment=prune schedule=[greedy]` chooses one head after the other, so that of two"
        " that can replace each other one stays."
    )
    figures = (interactions, together)
    say = staticmethod(say_interactions)
    headline = staticmethod(numbers_of_pairs)

    def check(self, setup: Setup) -> None:
        the_one(setup.schedules)
        setup.check_scorers()
        if len(setup.grid) < 2:
            raise ValueError(f"experiment=interact: the model has {len(setup.grid)} heads, a pair needs 2")

    def __call__(self, study: Study) -> Findings:
        subject, examples = study.subject, study.splits.report
        scoring = Scoring(subject, study.splits.score, study.seed, study.remember)
        budgets = range(len(subject.grid) + 1)
        with doing("score"):
            made = plans_of(choices(scoring, study.scorers, the_one(study.schedules), budgets))
        plans = [plan for plan in made if plan.draw == 0]
        every = HeadMask(subject.grid)
        alone = [every.without(head) for head in subject.grid]
        pairs = [every.without(*pair) for pair in combinations(subject.grid, 2)]
        rise_ME, quality_M = rises_and_quality(subject, examples, [*alone, *pairs, *(plan.mask for plan in plans)])
        alone_NE, pairs_PE, planned_ME = np.split(rise_ME, [len(alone), len(alone) + len(pairs)])
        first_P, second_P = np.triu_indices(len(alone), 1)
        interaction_PE = pairs_PE - alone_NE[first_P] - alone_NE[second_P]
        tables = {
            "alone": pd.DataFrame(
                head_columns(head) | with_interval(LOSS_RISE, rise_E) | {QUALITY: quality}
                for head, rise_E, quality in zip(subject.grid, alone_NE, quality_M[1:], strict=False)
            ).assign(open_quality=quality_M[0]),
            "pairs": pd.DataFrame(
                head_columns(first)
                | dict(zip(OTHER_HEAD, head_columns(second).values(), strict=True))
                | {LOSS_RISE: both_E.mean()}
                | with_interval(INTERACTION, interaction_E)
                for (first, second), both_E, interaction_E in zip(
                    combinations(subject.grid, 2), pairs_PE, interaction_PE, strict=True
                )
            ).assign(
                **{
                    f"{INTERACTION}_p": differs_p(moments(interaction_PE.T), interaction_PE.shape[1]),
                    "tolerance": self.tolerance_nats,
                }
            ),
            "together": together_table(plans, planned_ME, alone_NE.mean(axis=1), interaction_PE.mean(axis=1)),
        }
        tables["pairs"]["kind"] = kinds_of_pairs(tables["pairs"], tables["alone"])
        equivalence = EquivalenceCheck(subject, study.splits.proof)
        with doing("prove"):
            for plan in track(plans, "removed equals masked", name=plan_words):
                equivalence.prove(plan.mask)
        return with_proofs(study, tables, equivalence.worst)


def differs_p(moments_3N: np.ndarray, examples: float) -> np.ndarray:
    """Return the two-sided p of each mean against 0, (N,), corrected for all N tests (Holm 1979)."""
    both = (moments_3N, moments_3N * [[-1.0], [1.0], [-1.0]])
    below_N, above_N = (p_below(each, 0.0, examples) for each in both)
    return holm(np.minimum(1.0, 2 * np.minimum(below_N, above_N)))


def kinds_of_pairs(pairs: pd.DataFrame, alone: pd.DataFrame) -> list[str]:
    """Return the kind of each pair: `STAND_IN`, `TOGETHER`, `BROKEN` or, for a small or unsure interaction, `NEITHER`.
    A negative interaction is `BROKEN` if one head closed alone leaves at most half of the quality."""
    broken = set(named(alone[alone[QUALITY] <= alone["open_quality"] / 2]))
    breaks = [bool({first, second} & broken) for first, second in zip(named(pairs), other_heads(pairs), strict=True)]
    counts = (pairs[INTERACTION].abs() >= pairs["tolerance"]) & (pairs[f"{INTERACTION}_p"] < 1 - CONFIDENCE)
    cases = {NEITHER: ~counts, STAND_IN: pairs[INTERACTION] > 0, BROKEN: np.array(breaks, dtype=bool)}
    return list(np.select(list(cases.values()), list(cases), TOGETHER))


def rises_and_quality(subject: Subject, examples: Data, masks: Sequence[HeadMask]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rise of each example's loss when the heads of each mask are closed, (M, E), and the mean quality with
    all heads open and then under each mask, (1 + M,)."""
    masks = [HeadMask(subject.grid), *masks]
    parts = [measure_removed(subject, part, masks) for part in track(list(examples.batches(BATCH_SIZE)), "pairs")]
    loss_ME, quality_ME = (
        torch.cat(values, dim=1).double().cpu().numpy()
        for values in ([part.loss for part in parts], [part.quality for part in parts])
    )
    return loss_ME[1:] - loss_ME[0], quality_ME.mean(axis=1)


def together_table(
    plans: Sequence[Plan], planned_ME: np.ndarray, alone_N: np.ndarray, interaction_P: np.ndarray
) -> pd.DataFrame:
    """Return a row per plan: the cost of removing its heads together; `expected_alone`, the sum of the costs of its
    heads alone; and `expected_pairs`, this sum plus the interactions of all pairs of its heads."""
    interaction_NN = np.zeros((len(alone_N), len(alone_N)))
    interaction_NN[np.triu_indices(len(alone_N), 1)] = interaction_P
    rows: list[dict[str, Any]] = []
    for plan, rise_E in zip(plans, planned_ME, strict=True):
        gone_N = 1 - plan.mask.gates().numpy()
        alone = float(np.einsum("n,n->", gone_N, alone_N))
        pairs = float(np.einsum("i,ij,j->", gone_N, interaction_NN, gone_N))
        rows.append(
            plan_columns(plan)
            | with_interval(LOSS_RISE, rise_E)
            | {"expected_alone": alone, "expected_pairs": alone + pairs}
        )
    return pd.DataFrame(rows)
