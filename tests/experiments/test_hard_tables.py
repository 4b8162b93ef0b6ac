"""Figures of tables at the edge of what a run can bring: one head or 768, nothing to remove, one budget, no numbers,
names of sixty letters. Each is drawn and can be read, or is not drawn at all."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mhaprune.lab.experiments.base import figures_of
from mhaprune.tables import BEST_OF_SIZE, DENSE, DENSE_AGAIN, HEAD, MOMENTS, NOTHING, REFERENCE
from support.composing import run_of, tables_in
from support.figures import check_legible, words_in
from support.sizes import options, slow

Frames = dict[str, pd.DataFrame]
LONG = "a_scorer_that_somebody_has_given_a_name_of_exactly_60_letter"
"""Letters: 60."""
KNOWN = {REFERENCE, NOTHING, DENSE, DENSE_AGAIN, BEST_OF_SIZE}
"""Names that the code gives."""
CHOSEN_BY_USERS = ("scorer", "other", "schedule", "recovery", "first", "choice")
"""The columns of names that a user may choose."""
BY_SIZE = ("pruning", "recovery", "recovered", "oracle", "together")
"""The tables with a row per budget."""


def of_heads(tables: Frames) -> Frames:
    return {name: frame for name, frame in tables.items() if set(HEAD) <= set(frame) and len(frame)}


def long_names(tables: Frames) -> Frames:
    def longer(name: object) -> object:
        return f"{name}_{LONG}"[:60] if isinstance(name, str) and name and name not in KNOWN else name

    return {
        name: frame.assign(**{column: frame[column].map(longer) for column in CHOSEN_BY_USERS if column in frame})
        for name, frame in tables.items()
    }


def only_one_head(tables: Frames) -> Frames:
    """And so no pairs."""
    found = of_heads(tables)
    if not found:
        return tables
    first = list(next(iter(found.values()))[HEAD].iloc[0])
    one = {name: frame[(frame[HEAD] == first).all(axis=1)] for name, frame in found.items()}
    return tables | one | {name: tables[name].iloc[:0] for name in ("pairs",) if name in tables}


def hundreds_of_heads(tables: Frames) -> Frames:
    """22 times as many layers, and 6 times as many heads in each."""
    found = of_heads({name: frame for name, frame in tables.items() if name != "attention"})
    found.pop("pairs", None)
    grown = dict(tables)
    for name, frame in found.items():
        layers, heads = 1 + int(frame["layer"].max()), 1 + int(frame["head"].max())
        steps = product(range(22), range(6))
        copies = [frame.assign(layer=frame["layer"] + layers * i, head=frame["head"] + heads * j) for i, j in steps]
        grown[name] = pd.concat(copies).sort_values(HEAD, kind="stable", ignore_index=True)
        if "rank" in frame:
            rankings = grown[name].groupby([column for column in ("scorer", "draw") if column in frame])
            grown[name]["rank"] = rankings["rank"].rank(method="first")
    return grown


def one_size(tables: Frames) -> Frames:
    """Beside the whole model."""
    sizes = {name: tables[name] for name in BY_SIZE if "heads_removed" in tables.get(name, ())}
    return tables | {
        name: frame[frame["heads_removed"].isin([0, frame["heads_removed"].max()])] for name, frame in sizes.items()
    }


def nothing_measured(tables: Frames) -> Frames:
    gone = (*MOMENTS, "spearman", "entropy", "mass")
    return {
        name: frame.assign(**{column: np.nan for column in gone if column in frame}) for name, frame in tables.items()
    }


CHANGES = {each.__name__: each for each in (long_names, only_one_head, hundreds_of_heads, one_size, nothing_measured)}
EXPERIMENTS = [name for name in options("experiment") if name not in ("evaluate", "train")]
"""Without those that draw no heads."""
QUICK = [("explain", "only_one_head"), ("prune", "long_names"), ("ablate", "nothing_measured")]


@pytest.mark.parametrize(
    ("experiment", "change"), [*QUICK, *slow(*(case for case in product(EXPERIMENTS, CHANGES) if case not in QUICK))]
)
def test_what_a_run_left_is_drawn_at_the_edge_too(
    experiment: str, change: str, ran: Callable[[str], Path], shared: Path
) -> None:
    """Of every experiment every figure that there is: it can be read, fits a page and never says `nan`."""
    kind = type(run_of(experiment, shared / "cache").experiment)
    count = 0
    for plot in figures_of(kind, CHANGES[change](tables_in(ran(experiment)))):
        words = [each for each, _ in words_in(plot.figure)]
        if len(words) > 5:  # a map of one head has few
            check_legible(plot)
        assert not any("nan" in each.lower().split() for each in words), (plot.name, words)
        assert (plot.figure.get_size_inches() < 40).all(), plot.name
        count += 1
    assert count > 0
