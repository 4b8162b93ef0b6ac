"""The heads of cross-attention that look at the source symbols which the written symbol stands for: the table
`alignment`, its sentences and its figure.

Dimensions: B = batch, T = target positions, S = source positions.
"""

from collections.abc import Iterator
from math import isnan

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from mhaprune.data import Data
from mhaprune.experiments.explain.patterns import ALIGNED
from mhaprune.heads import HeadId
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.reporting import plots
from mhaprune.reporting.plots import Plot, needs, number
from mhaprune.reporting.sentences import share
from mhaprune.scorers.agreement import spearman
from mhaprune.tables import HEAD, REFERENCE, Tables, candidates, in_brackets
from mhaprune.tasks.base import Aligned

OFFSETS = range(-3, 4)
"""The distances that a head without knowledge of the symbols may look at."""


def alignment_table(
    aligned: Aligned, examples: Data, patterns: pd.DataFrame, heads: pd.DataFrame
) -> dict[str, pd.DataFrame]:
    """Return the table `alignment` by its name: one row per cross-attention head and scorer. None without such heads.

    `accuracy` is the share of the target symbols for which the largest weight of the head is on an aligned source
    symbol. `offset_accuracy` is that of a head that always looks at the same distance, the best of `OFFSETS`.
    `spearman` is the rank correlation of `accuracy` and the score over these heads.
    """
    hits, symbols = torch.zeros(len(OFFSETS)), 0
    for batch in examples.batches(BATCH_SIZE):
        places_BTS = aligned(batch)
        symbols += int(places_BTS.any(dim=2).sum())
        hits += torch.tensor([float(places_BTS.diagonal(by, dim1=1, dim2=2).sum()) for by in OFFSETS])
    scores = heads[heads["draw"] == 0][[*HEAD, "scorer", "score", "rank"]]
    looks = patterns.loc[patterns["pattern"] == ALIGNED, [*HEAD, "largest", "chance"]]
    looks = looks.rename(columns={"largest": "accuracy"}).assign(offset_accuracy=float(hits.max()) / symbols)
    table = looks.merge(scores, on=HEAD)
    for name, rows in table.groupby("scorer"):
        table.loc[table["scorer"] == name, "spearman"] = spearman(rows["accuracy"], rows["score"])
    return {"alignment": table} if len(table) else {}


def without_duplicates(patterns: pd.DataFrame) -> pd.DataFrame:
    """Return the patterns without `ALIGNED`, if another one has the same places: on `sort` the symbol to write."""
    masses = patterns.pivot_table(index=HEAD, columns="pattern", values="mass")
    if ALIGNED not in masses:
        return patterns
    masses = masses.dropna(subset=[ALIGNED])
    twice = any(np.allclose(masses[name], masses[ALIGNED]) for name in masses if name != ALIGNED)
    return patterns[patterns["pattern"] != ALIGNED] if twice else patterns


def alignment_sentences(tables: Tables) -> Iterator[str]:
    """Yield which head aligns best and, of several heads, whether ablation ranks the heads that align first."""
    if "alignment" not in tables:
        return
    table = tables["alignment"].query("scorer == @REFERENCE")
    best = table.loc[table["accuracy"].idxmax()]
    yield (
        f"{HeadId(*best[HEAD])} aligns best: for {share(best['accuracy'])} of the symbols that are written its largest"
        f" weight is on a symbol that they stand for ({share(best['chance'])} by chance,"
        f" {share(best['offset_accuracy'])} for a head that always looks at the same distance). By ablation it has rank"
        f" {int(best['rank'])}."
    )
    if not isnan(best["spearman"]):  # as of a single head
        rho = number(best["spearman"], 2)
        yield (
            f"Among the {len(table)} heads of cross-attention, alignment and ablation have a rank correlation of {rho}."
        )


@needs("alignment")
def alignment_scores(tables: Tables) -> Plot | None:
    """Draw the score of the cross-attention heads against how well they align: by ablation or, without it, by the first
    scorer."""
    table = tables["alignment"]
    names = [name for name in candidates(table.assign(draw=0)) if name != "random"]
    if not names:
        return None
    name = REFERENCE if REFERENCE in names else names[0]
    table = table[table["scorer"] == name]
    figure = Figure(figsize=(5.2, 3.9))
    axes = figure.add_subplot()
    axes.axvline(table["offset_accuracy"].iloc[0], color="black", linestyle=":", label="the same distance always")
    axes.axvline(table["chance"].mean(), color=plots.CONTROL_COLOUR, label="chance")
    for layer, head, accuracy, score in table[["layer", "head", "accuracy", "score"]].itertuples(index=False):
        colour = plots.COLOURS[layer % len(plots.COLOURS)]
        axes.plot(accuracy, score, marker=f"${layer}.{head}$", color=colour, markersize=15)
    score = f"rise of the loss{in_brackets(tables)}" if name == REFERENCE else f"score by {name}"
    axes.set(xlabel="alignment accuracy", ylabel=score, xlim=(-0.03, 1.03))
    rho = table["spearman"].iloc[0]
    title = "" if isnan(rho) else f"Alignment and {name} have a rank correlation of {number(rho, 2)}"
    plots.legend_above(figure, axes, title)
    caption = (
        "Each mark is a head of cross-attention, named by its layer and its number. To the right are heads whose"
        " largest weight is often on the source symbols that the written symbol stands for; high up are heads"
        f" that matter by {name}. The rank correlation is Spearman's, over these heads of one model."
    )
    return Plot("alignment", caption, figure)
