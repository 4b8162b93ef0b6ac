"""The heads of cross-attention that look at the source symbols which the written symbol stands for.

Dimensions: B = batch, T = target positions, S = source positions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mhaprune.data import Data, Examples
from mhaprune.experiments.explain.patterns import ALIGNED
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.scorers.agreement import spearman
from mhaprune.tables import HEAD
from mhaprune.tasks.base import Task

OFFSETS = range(-3, 4)
"""The distances that a head without knowledge of the symbols may look at."""
Aligned = Callable[[Any], Tensor]
"""A function that takes a batch and returns a mask (B, T, S): True where a source symbol stands for a target symbol."""


def alignment_of(task: Task, examples: Examples) -> Aligned | None:
    """Return the alignment of a task, as `Task.aligned` knows it; None if it knows nothing of these examples."""

    def aligned(batch: Any) -> Tensor:
        places = torch.zeros(*batch.target.shape, batch.source.shape[1], dtype=torch.bool)
        for i, (source, target) in enumerate(zip(batch.source.tolist(), batch.target.tolist(), strict=True)):
            for t, positions in enumerate(task.aligned(source, target)):
                places[i, t, list(positions)] = True
        return places.to(batch.device)

    return aligned if aligned(examples[:BATCH_SIZE]).any() else None


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
