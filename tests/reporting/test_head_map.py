"""The map of the heads says what the tables say."""

from __future__ import annotations

from math import nan
from typing import Any

import matplotlib
import pandas as pd
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyBboxPatch

from mhaprune.experiments.ablate.study import Ablate
from mhaprune.experiments.base import Experiment
from mhaprune.experiments.explain.study import Explain
from mhaprune.experiments.prune.study import Prune
from mhaprune.reporting.head_map import heads_that_matter
from mhaprune.reporting.plots import STYLE, Plot
from mhaprune.tables import Tables
from support.legible import check_legible

HEADS = [("encoder_self", 0, 0), ("encoder_self", 0, 1), ("decoder_self", 0, 0), ("cross", 0, 0), ("cross", 0, 10)]
SCORES = {"ablation": [0.5, -0.001, 0.02, 2.5, 0.0], "gate": [1.0, 0.2, 0.3, 3.0, 0.5]}


def drawn(case: str) -> Plot:
    kind, tables, *_ = CASES[case]
    verdict = kind.head_map(tables)
    assert verdict is not None
    with matplotlib.rc_context(STYLE):
        return heads_that_matter(verdict)


def scored(*names: str) -> pd.DataFrame:
    rows = [
        {"scorer": name, "draw": 0, "site": s, "layer": n, "head": h, "score": score, "stderr": 0.0, "skewness": 0.0}
        for name in names
        for (s, n, h), score in zip(HEADS, SCORES[name], strict=True)
    ]
    return pd.DataFrame(rows)


def summary(**best: Any) -> pd.DataFrame:
    row = {"scorer": "gate", "recovery": "nothing", "heads_removed": 0, "removed": nan, "quality": 1.0}
    row |= {"tolerance": 0.01}
    return pd.DataFrame([row | {"choose_quality": 1.0}, row | {"choose_quality": 0.99} | best])


GONE = {"scorer": "ablation", "heads_removed": 2, "removed": "encoder_self.0.1 cross.0.10", "quality": 0.98}
SMALLEST = {
    "heads_kept": 2,
    "heads_removed": 3,
    "kept": "encoder_self.0.0 cross.0.0",
    "removed": "encoder_self.0.1 decoder_self.0.0 cross.0.10",
    "control": False,
    "steps": 30,
    "recovery": "fine_tune",
    "note": "",
    "quality": 0.97,
    "choose_quality": 0.97,
}


def looks() -> pd.DataFrame:
    table = scored("ablation").assign(rank=[2, 5, 3, 1, 4], removed=[False] * 4 + [True])
    table = table.assign(tolerance=0.01, without_prunable=0.4, open_quality=0.9)
    table.loc[4, "score"] = nan
    return table.assign(prunable=[False, True, False, False, False], name=["everywhere", "", None, "itself", None])


CASES: dict[str, tuple[type[Experiment], Tables, str, set[int]]] = {
    "ablate": (
        Ablate,
        {"summary": summary(**GONE), "heads": scored("gate", "ablation")},
        "2 of 5 heads removed: 0.980 exact match is left",
        {0, 2, 3},
    ),
    "nothing can go": (
        Ablate,
        {"summary": summary(), "heads": scored("gate")},
        "None of 5 heads can go at the budgets tried",
        {0, 1, 2, 3, 4},
    ),
    "prune": (
        Prune,
        {"smallest": pd.DataFrame([SMALLEST, SMALLEST | {"control": True, "heads_kept": 1, "heads_removed": 4}])},
        "2 of 5 heads are enough: 0.970 exact match after fine_tune",
        {0, 3},
    ),
    "explain": (
        Explain,
        {"looks": looks()},
        "Closing one head (of 4) costs next to nothing; without it, exact match is 0.400 instead of 0.900",
        {0, 2, 3},
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_what_stays_is_filled_and_what_can_go_is_empty(case: str) -> None:
    kind, tables, title, stay = CASES[case]
    found = kind.head_map(tables)
    assert found is not None
    assert found.title == title
    names = list(found.heads[["site", "layer", "head"]].itertuples(index=False, name=None))
    assert names == HEADS, "in the order of the model"
    assert set(found.heads.index[found.heads["stays"]].map(list(found.heads.index).index)) == stay
    plot = drawn(case)
    check_legible(plot)
    tiles = [patch for patch in plot.figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    assert {i for i, tile in enumerate(tiles) if tile.get_facecolor() != to_rgba("none")} == stay
    assert plot.alt.startswith(title)
    alone = kind is Explain
    gone = [tile for i, tile in enumerate(tiles) if i not in stay]
    assert {tile.get_linestyle() in ("-", "solid") for tile in gone} <= {alone}
    before, mark, after = plot.alt.partition("Cost next to nothing alone:" if alone else "Can go:")
    assert mark
    for i, (site, layer, head) in enumerate(HEADS):
        name = f"{site.replace('_', ' ')} {layer}.{head}"
        assert (name in before, name in after) == (i in stay, i not in stay)


def test_the_darker_the_more_it_costs() -> None:
    plot = drawn("ablate")
    light = [sum(tile.get_facecolor()[:3]) for tile in plot.figure.axes[0].patches]  # type: ignore[attr-defined]
    assert light[3] < light[0] < light[2]


def test_removed_heads_say_so_and_others_what_they_follow() -> None:
    plot = drawn("explain")
    words = [text.get_text() for text in plot.figure.axes[0].texts]
    assert words == ["0.500\neverywhere", "−0.001", "0.020", "2.500\nitself", "removed"]


def test_closing_all_at_once_is_told_apart_from_closing_any_one() -> None:
    """What each head costs alone says little about all of them together."""
    two = looks().assign(prunable=[False, True, True, False, False])
    titles = []
    for left in (0.4, 0.9):
        verdict = Explain.head_map({"looks": two.assign(without_prunable=left)})
        assert verdict is not None
        titles.append(verdict.title)
    alone = "Closing any one of 2 heads (of 4) costs next to nothing; with all 2 closed, exact match is "
    assert titles == [f"{alone}0.400 instead of 0.900", f"{alone}still 0.900"]
