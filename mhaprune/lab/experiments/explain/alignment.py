"""The heads of cross-attention that look at the source symbols which the written symbol stands for: the table
`alignment` and its sentences.

Dimensions: B = batch, T = target positions, S = source positions.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch

from mhaprune.data import Data
from mhaprune.heads import HeadId
from mhaprune.lab.experiments.explain.patterns import ALIGNED
from mhaprune.lab.reporting.agreement import spearman
from mhaprune.lab.reporting.sentences import share
from mhaprune.lab.tasks.base import Aligned
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.tables import HEAD, REFERENCE, Tables

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
    """Yield which head aligns best, and its rank by ablation."""
    if "alignment" not in tables:
        return
    table = tables["alignment"][tables["alignment"]["scorer"] == REFERENCE]
    best = table.loc[table["accuracy"].idxmax()]
    yield (
        f"{HeadId(*best[HEAD])} aligns best: for {share(best['accuracy'])} of the symbols that are written its largest"
        f" weight is on a symbol that they stand for ({share(best['chance'])} by chance,"
        f" {share(best['offset_accuracy'])} for a head that always looks at the same distance). By ablation it has rank"
        f" {int(best['rank'])}."
    )
