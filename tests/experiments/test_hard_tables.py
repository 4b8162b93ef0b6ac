"""Figures of tables at the edge of what a run can bring: one head or 768, nothing to remove, one budget, no numbers,
names of sixty letters. Each is drawn and can be read, or is not drawn at all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mhaprune.experiments.ablate.report import latency_curves
from mhaprune.experiments.ablate.study import Ablate
from mhaprune.experiments.base import figures_of
from mhaprune.reporting.plots import Plot
from mhaprune.tables import (
    BEST_OF_SIZE,
    DENSE,
    DENSE_AGAIN,
    HEAD,
    MOMENTS,
    NOTHING,
    REFERENCE,
    Tables,
)
from support.composing import run_of, tables_in
from support.legible import check_legible, words_in
from support.made_tables import answers_table, summary
from support.sizes import options, slow

Frames = dict[str, pd.DataFrame]
LONG = "a_scorer_that_somebody_has_given_a_name_of_exactly_60_letter"
"""Letters: 60."""


def tables_of(heads: int, budgets: list[int], scorers: tuple[str, ...] = ("gate", "ablation")) -> Frames:
    draw = np.random.default_rng(0)
    names = [("cross", i // 12, i % 12) for i in range(heads)]
    rows = [
        {"scorer": scorer, "draw": 0, "site": site, "layer": layer, "head": head}
        | {"score": float(draw.lognormal(-4, 3)), "stderr": 0.001, "skewness": 0.1}
        for scorer in scorers
        for site, layer, head in names
    ]
    pruning = [
        {"scorer": scorer, "draw": 0, "heads_total": heads, "heads_removed": removed}
        | {"fraction_removed": removed / heads, "quality": 1 - 0.5 * removed / heads}
        | {"quality_low": 0.4, "quality_high": 1.0, "speedup": 1.1, "speedup_q1": 1.0, "speedup_q3": 1.2}
        for scorer in scorers
        for removed in budgets
    ]
    gone = " ".join(f"cross.{layer}.{head}" for _, layer, head in names[: budgets[-1]])
    own = summary().head(1).assign(scorer=scorers[-1], heads_total=heads, heads_removed=budgets[-1], removed=gone)
    pairs = [{"scorer": scorer, "other": "ablation", "spearman": 0.5} for scorer in scorers if scorer != "ablation"]
    return {
        "summary": own,
        "heads": pd.DataFrame(rows),
        "pruning": pd.DataFrame(pruning),
        "agreement": pd.DataFrame(pairs),
        "latency": pd.DataFrame([{"scorer": "dense again", "speedup_q1": 0.98, "speedup_q3": 1.02}]),
        "answers": answers_table(),
    }


def without_numbers(tables: Frames) -> Frames:
    return {**tables, "heads": tables["heads"].assign(score=np.nan, stderr=np.nan, skewness=np.nan)}


def half_without_numbers(tables: Frames) -> Frames:
    heads = tables["heads"]
    return {**tables, "heads": heads.assign(score=heads["score"].where(heads["head"] % 2 == 0))}


def as_it_is(tables: Frames) -> Frames:
    return tables


CASES: dict[str, tuple[Frames, Callable[[Frames], Frames]]] = {
    "one head": (tables_of(1, [0, 1]), as_it_is),
    "nothing removed": (tables_of(4, [0]), as_it_is),
    "one budget": (tables_of(24, [0, 12]), as_it_is),
    "no scores": (tables_of(24, [0, 12, 24]), without_numbers),
    "some scores": (tables_of(24, [0, 12, 24]), half_without_numbers),
    "long names": (tables_of(24, [0, 12, 24], (LONG, "ablation", LONG[::-1])), as_it_is),
    "a large model": (tables_of(768, [0, 192, 384, 768]), as_it_is),
    "many budgets": (tables_of(72, list(range(0, 73, 3))), as_it_is),
}


def drawn(case: str) -> dict[str, Plot]:
    tables, change = CASES[case]
    found: Tables = change(tables)
    return {plot.name: plot for plot in figures_of(Ablate, found)}


@pytest.mark.parametrize("case", CASES)
def test_every_figure_is_drawn_and_can_be_read(case: str) -> None:
    plots = drawn(case)
    without = {"agreement"} if case == "no scores" else set()
    assert set(plots) == {"matter", "accuracy", "heads", "agreement", "latency", "answers"} - without
    for plot in plots.values():
        if (case, plot.name) != ("one head", "matter"):  # a tile has few words
            check_legible(plot)
        assert plot.png.startswith(b"\x89PNG") or case == "a large model"
        assert (plot.figure.get_size_inches() < 40).all()


def test_a_model_that_is_far_faster_stays_in_the_figure_of_speed_and_its_bar_does_not_press_it_down() -> None:
    tables = tables_of(24, [0, 12])
    fast = tables["pruning"].assign(speedup=5, speedup_q1=4.5, speedup_q3=100)
    plot = latency_curves({**tables, "pruning": fast})
    assert plot is not None
    assert 5 < plot.figure.axes[0].get_ylim()[1] < 6
    slow = tables["pruning"].assign(speedup=0.2, speedup_q1=0.1, speedup_q3=0.3)
    plot = latency_curves({**tables, "pruning": slow})
    assert plot is not None
    assert 1 < plot.figure.axes[0].get_ylim()[1] < 1.2, "the line of the dense model stays"


def test_the_name_is_long() -> None:
    assert len(LONG) == 60


KNOWN = {REFERENCE, NOTHING, DENSE, DENSE_AGAIN, BEST_OF_SIZE}
"""Names that the code gives."""
CHOSEN_BY_USERS = ("scorer", "other", "schedule", "recovery", "first", "choice")
"""The columns of names that a user may choose."""
BY_SIZE = ("pruning", "recovery", "recovered", "groups", "answers", "oracle", "together")
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
        copies = [
            frame.assign(layer=frame["layer"] + layers * i, head=frame["head"] + heads * j)
            for i in range(22)
            for j in range(6)
        ]
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
    gone = (*MOMENTS, "spearman", "spearman_with_ablation", "entropy", "mass")
    return {
        name: frame.assign(**{column: np.nan for column in gone if column in frame}) for name, frame in tables.items()
    }


CHANGES = {each.__name__: each for each in (long_names, only_one_head, hundreds_of_heads, one_size, nothing_measured)}
EXPERIMENTS = [name for name in options("experiment") if name not in ("anatomy", "evaluate", "train")]
"""`anatomy` shows one example of one call of a layer, and the other two show none."""
QUICK = [("interact", "only_one_head"), ("prune", "long_names")]


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
