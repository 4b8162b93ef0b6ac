"""Masks and scores in the forms in which people have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mhaprune.data import Data, Splits
from mhaprune.heads import BlockId, HeadGrid, HeadId, HeadMask
from mhaprune.hooks.blocks import Unsupported
from mhaprune.measure.outcomes import ProofFailed
from mhaprune.pruning.pruned import EquivalenceCheck
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.scoring import naming, settings_text
from mhaprune.settings.options import option
from mhaprune.settings.ranges import python_number
from mhaprune.settings.refusals import foreign
from mhaprune.storage.locks import read_bytes
from mhaprune.subject import Subject
from mhaprune.surgery.removal import MustKeep

MOST_BYTES = 2**20
"""The largest size of a file with a mask: a megabyte names more heads than a model has."""


def mask_of(given: Any, grid: HeadGrid) -> HeadMask:
    """Return a `HeadMask` on a grid.

    `given` is a mask; names of removed heads; the numbers of the removed heads by layer, `{0: [1], "cross.1": [0, 3]}`;
    gates (N,) or (layers, H) of 0 and 1, where 0 removes; or names or numbers as JSON, as a text or in a file. Raises
    ValueError, one line, for anything else.
    """
    if isinstance(given, HeadMask):
        if given.grid != grid:
            raise ValueError("mask: is of other heads than these, or of sets of heads")
        return given
    if isinstance(given, str | Path):
        with foreign(f"mask={str(given)[:60]!r}: must be JSON, or a file with JSON"):
            is_json = str(given).lstrip()[:1] in ("[", "{")
            return mask_of(json.loads(str(given) if is_json else read_bytes(Path(given), MOST_BYTES)), grid)
    if isinstance(given, Mapping):
        return HeadMask(grid).without(*_by_layer(given, grid))
    if isinstance(given, Sequence) and all(isinstance(each, str | HeadId) for each in given):
        named = [HeadId.parse(each) if isinstance(each, str) else each for each in given]
        if len(set(named)) != len(named):
            raise ValueError("mask: names a head twice")
        return HeadMask(grid).without(*named)
    gates = _numbers("mask", given, grid)
    if not np.isin(gates, (0, 1)).all():
        raise ValueError(f"mask: gates are {gates[~np.isin(gates, (0, 1))][0]:g}, must be 0 (removed) or 1")
    return HeadMask(grid, frozenset(head for head, gate in zip(grid, gates, strict=True) if gate == 0))


def _by_layer(given: Mapping[Any, Any], grid: HeadGrid) -> list[HeadId]:
    """Return the heads that a mapping from layers to numbers of heads names."""
    heads = []
    for layer, numbers in given.items():
        block = _block("mask", layer, grid)
        numbers = numbers.tolist() if isinstance(numbers, np.ndarray | Tensor) else numbers
        numbers = [*map(python_number, numbers)] if isinstance(numbers, Sequence) else numbers
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise ValueError(f"mask={layer}: {numbers!r} must be a list of numbers of heads")
        heads += [HeadId(*block, number) for number in numbers]
    if len(set(heads)) != len(heads):
        raise ValueError("mask: names a head twice")
    return heads


def least_of(given: Mapping[Any, Any], grid: HeadGrid, divisible_by: int = 1) -> dict[BlockId, int]:
    """Return how many heads each block keeps, from numbers by layer, `{0: 2, "cross.1": 4}`; blocks that are not named
    keep all. Raises ValueError, one line, for a number that the block does not have."""
    least = dict(zip(grid.blocks, grid.sizes, strict=True))
    named = [(layer, _block("even", layer, grid), python_number(number)) for layer, number in given.items()]
    for n, (layer, block, number) in enumerate(named):
        if block in (other for _, other, _ in named[:n]):
            raise ValueError(f"even={layer}: names {block} again")
        if type(number) is not int or not 0 <= number <= least[block] or number % divisible_by:
            which = f" that {divisible_by} divides" if divisible_by > 1 else ""
            raise ValueError(f"even={layer}: keeps {number!r}, must be a whole number from 0 to {least[block]}{which}")
        least[block] = number
    return least


def _block(key: str, layer: Any, grid: HeadGrid) -> BlockId:
    """Return the block that a number or a name means; `key` begins the error message."""
    blocks = [block for block in grid.blocks if str(layer) in (str(block), str(block.layer))]
    if len(blocks) != 1:
        those = ", ".join(map(str, blocks or grid.blocks))
        raise ValueError(f"{key}={layer}: names {len(blocks)} layers, must be one of {those}")
    return blocks[0]


@dataclass(frozen=True)
class GivenScores(Scorer):
    """Scores that the user brings, higher is more important."""

    scores: tuple[tuple[str, float], ...]
    """A name and a score for each head."""

    reads_examples = False

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        named = dict(self.scores)
        return Scores(torch.tensor([[named[str(head)] for head in subject.grid]], dtype=torch.double))


def scores_of(given: Any, grid: HeadGrid) -> GivenScores:
    """Return scores of heads as a scorer.

    `given` is an array (N,) or (layers, H), a mapping from names of heads to scores, or a frame with a row per head,
    such as `heads.score` returns. Raises ValueError, one line, for too many or too few, and for NaN.
    """
    if isinstance(given, pd.DataFrame):
        if missing := {"site", "layer", "head", "score"} - set(given.columns):
            raise ValueError(f"by: a frame without {', '.join(sorted(missing))}, as heads.score() has")
        columns = (given[name].tolist() for name in ("site", "layer", "head", "score"))
        pairs = [(str(HeadId(*head)), score) for *head, score in zip(*columns, strict=True)]
        given = dict(pairs)
        if len(given) != len(pairs):
            raise ValueError(
                "by: a frame with several scores of one head; choose the rows of one scorer, draw and kind"
            )
    if isinstance(given, Mapping):
        named = {str(name): score for name, score in given.items()}
        names_of = [str(head) for head in grid]
        if wrong := sorted(set(named).symmetric_difference(names_of)):
            raise ValueError(f"by: {wrong[0]} is {'missing' if wrong[0] in names_of else 'no head of the model'}")
        given = [named[name] for name in names_of]
    return GivenScores(tuple(zip(map(str, grid), _numbers("by", given, grid).tolist(), strict=True)))


def _numbers(name: str, given: Any, grid: HeadGrid) -> np.ndarray:
    """Return one number per head, (N,)."""
    try:
        values = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given, dtype=float)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: {type(given).__name__} of no numbers, must have one for each head") from None
    by_layer = (len(grid.blocks), grid.sizes[0]) if len(set(grid.sizes)) == 1 else None
    if values.shape not in ((len(grid),), by_layer):
        shapes = f"({len(grid)},)" + (f" or {by_layer}" if by_layer else "")
        raise ValueError(f"{name}: numbers of shape {values.shape}, must be {shapes}")
    if np.isnan(values).any():
        raise ValueError(f"{name}: NaN for {grid.heads[int(np.isnan(values.ravel()).argmax())]}, must be numbers")
    return values.ravel()


def named_scorers(subject: Subject, scorers: Iterable[str | Scorer]) -> dict[str, Scorer]:
    """Return scorers by their names. Raises ValueError, one line, for one that does not fit the model."""
    chosen: dict[str, Scorer] = {}
    for scorer in scorers:
        made = option(scorer, {"scorer": Scorer}) if isinstance(scorer, str) else scorer
        name = scorer if isinstance(scorer, str) else type(scorer).__name__
        with naming(name):
            made.check(len(subject.grid), gated=subject.learned_gates() is not None)
        if chosen.get(name, made) != made:
            name = f"{name} {settings_text(made)}"
        chosen[name] = made
    return chosen


def two_examples(splits: Splits[Any], name: str) -> None:
    """Raise ValueError for a split of one example."""
    if (count := len(splits[name])) < 2:
        raise ValueError(f"{name}: holds {count} example, an interval needs two or more")


def kept_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which torch draws the same random numbers as without it."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def prove_removal(equivalence: EquivalenceCheck, mask: HeadMask) -> None:
    """Prove that removing the heads of a mask is masking them. Raises `Unsupported` for a model that does not run
    without them."""
    try:
        equivalence.prove(mask)
    except (ProofFailed, MustKeep):
        raise
    except Exception as error:  # of a model that may be anybody's
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise Unsupported(f"heads of this model can be gated, not removed: {reason}") from error
