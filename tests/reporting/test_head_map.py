"""Maps of the heads say what the tables say."""

from math import nan
from typing import Any

import matplotlib
import pandas as pd
import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyBboxPatch

from mhaprune.lab.experiments.ablate import Ablate
from mhaprune.lab.experiments.base import Experiment
from mhaprune.lab.experiments.explain.explain import Explain
from mhaprune.lab.experiments.prune.prune import Prune
from mhaprune.lab.model.sites import SITES
from mhaprune.lab.reporting.head_map import MOST_NAMED, PALE, Verdict, heads_that_matter, in_small
from mhaprune.lab.reporting.plots import STYLE
from mhaprune.tables import Tables
from support.figures import check_legible

HEADS = [("encoder_self", 0, 0), ("encoder_self", 0, 1), ("decoder_self", 0, 0), ("cross", 0, 0), ("cross", 0, 10)]
SCORES = {"ablation": [0.5, -0.001, 0.02, 2.5, 0.0], "gate": [1.0, 0.2, 0.3, 3.0, 0.5]}


def scored(*names: str) -> pd.DataFrame:
    rows = [
        {"scorer": name, "draw": 0, "site": s, "layer": n, "head": h, "score": score, "stderr": 0.0, "skewness": 0.0}
        for name in names
        for (s, n, h), score in zip(HEADS, SCORES[name], strict=True)
    ]
    return pd.DataFrame(rows)


def summary(**best: Any) -> pd.DataFrame:
    row = {"scorer": "gate", "recovery": "nothing", "heads_removed": 0, "removed": nan, "quality": 1.0}
    return pd.DataFrame([row | {"choose_quality": 1.0}, row | {"choose_quality": 0.99} | best]).assign(tolerance=0.01)


GONE = {"scorer": "ablation", "heads_removed": 2, "removed": "encoder_self.0.1 cross.0.10", "quality": 0.98}
SMALLEST = {
    "heads_kept": 2,
    "heads_removed": 3,
    "kept": "encoder_self.0.0 cross.0.0",
    "control": False,
    "steps": 30,
    "note": "",
}
SMALLEST |= {"removed": "encoder_self.0.1 decoder_self.0.0 cross.0.10", "recovery": "fine_tune"}
SMALLEST |= {"steps": 30, "quality": 0.97, "choose_quality": 0.97}


def looks() -> pd.DataFrame:
    table = scored("ablation").assign(rank=[2, 5, 3, 1, 4], removed=[False] * 4 + [True])
    table = table.assign(tolerance=0.01, without_prunable=0.4, open_quality=0.9)
    table.loc[4, "score"] = nan
    return table.assign(prunable=[False, True, False, False, False], name=["everywhere", "", None, "itself", None])


def explained() -> Tables:
    """The cost of the head with 0.02 is not known well enough to say whether it is more than 0.01."""
    return {"looks": looks(), "heads": scored("ablation").assign(stderr=[0.0, 0.0, 0.02, 0.0, 0.0])[:4]}


BOTH = [SMALLEST, SMALLEST | {"control": True, "heads_kept": 1, "heads_removed": 4}]
TRIED = pd.DataFrame({"heads_removed": [0, 2, 3, 5]})
CASES: dict[str, tuple[type[Experiment], Tables, set[int]]] = {
    "ablate": (Ablate, {"summary": summary(**GONE), "heads": scored("gate", "ablation")}, {0, 2, 3}),
    "nothing can go": (Ablate, {"summary": summary(), "heads": scored("gate"), "pruning": TRIED}, {0, 1, 2, 3, 4}),
    "prune": (Prune, {"smallest": pd.DataFrame(BOTH)}, {0, 3}),
    "explain": (Explain, explained(), {0, 2, 3}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_what_stays_is_filled_and_what_can_go_is_empty(case: str) -> None:
    """The darker, the more a head costs; a removed one says so, and others what they follow."""
    kind, tables, stay = CASES[case]
    found = kind.head_map(tables)
    assert found is not None
    names = list(found.heads[["site", "layer", "head"]].itertuples(index=False, name=None))
    assert names == HEADS, "in the order of the model"
    assert set(found.heads.index[found.heads["stays"]].map(list(found.heads.index).index)) == stay
    with matplotlib.rc_context(STYLE):
        plot = heads_that_matter(found)
    check_legible(plot)
    tiles = [patch for patch in plot.figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    assert {i for i, tile in enumerate(tiles) if tile.get_facecolor() != to_rgba("none")} == stay
    assert plot.alt.startswith(found.title)
    alone = kind is Explain
    undecided = {i for i, tile in enumerate(tiles) if tile.get_facecolor() == to_rgba(PALE)}
    assert undecided == ({2} if alone else set())
    gone = [tile for i, tile in enumerate(tiles) if i not in stay]
    assert {tile.get_linestyle() in ("-", "solid") for tile in gone} <= {alone}
    before, mark, after = plot.alt.partition("Cost next to nothing alone:" if alone else "Can be removed:")
    assert mark
    for i, (site, layer, head) in enumerate(HEADS):
        name = f"{SITES[site]} {layer}.{head}"
        assert (name in before, name in after) == (i in stay - undecided, i not in stay - undecided)
        assert (name in after.partition("Not decided:")[2]) == (i in undecided or (alone and i == 4)), (
            "the last is gone"
        )
    if case == "ablate":
        light = [sum(tile.get_facecolor()[:3]) for tile in tiles]
        assert light[3] < light[0] < light[2]
    if case == "explain":
        words = [text.get_text() for text in plot.figure.axes[0].texts]
        assert words == ["0.500\nspread evenly", "−0.001", "0.020", "2.500\nitself", "removed"]


@pytest.mark.parametrize("width", [MOST_NAMED, MOST_NAMED + 1, 16])
def test_letters_of_a_wide_map_can_be_read_on_a_page(width: int) -> None:
    heads = pd.DataFrame([("cross", 0, i) for i in range(width)], columns=["site", "layer", "head"])
    heads = heads.assign(score=-0.001, name="symbol just written", stays=True)
    plot = heads_that_matter(Verdict(heads, "ablation", "a title", "a meaning"))
    words = list(plot.figure.axes[0].texts)
    assert all(("symbol" in text.get_text()) == (width <= MOST_NAMED) for text in words)
    page = 1000  # pixels, the width of the page; an inch of a figure that fits has 96
    scale = min(1.0, page / (96 * plot.figure.get_figwidth()))
    assert min(text.get_fontsize() for text in words) / 72 * 96 * scale >= 8


def test_what_a_map_is_called(snapshot: Any) -> None:
    """What each head costs alone says little about all of them together."""
    two = looks().assign(prunable=[False, True, True, False, False])
    tables = {case: (kind, tables) for case, (kind, tables, _) in CASES.items()}
    tables |= {
        f"two, {left} is left": (Explain, explained() | {"looks": two.assign(without_prunable=left)})
        for left in (0.4, 0.9)
    }
    snapshot("head_maps", {case: [str(kind.head_map(own).title)] for case, (kind, own) in tables.items()})  # type: ignore[union-attr]


def test_many_units_of_a_block_are_one_bar_of_the_share_that_stays() -> None:
    """Thousands of tiles could not be read. A page's thumbnail has a short row for them."""
    neurons = pd.DataFrame({"site": "neuron", "layer": 0, "head": range(80), "stays": [True] * 60 + [False] * 20})
    heads = pd.DataFrame({"site": "cross", "layer": 0, "head": range(3), "stays": [True, False, True]})
    both = pd.concat([heads, neurons], ignore_index=True).assign(score=1.0, name="")
    for units, words in ((both, 3), (both.tail(80), 0)):
        verdict = Verdict(units, "gate", "20 removed", "Gone.", tables=())
        plot = heads_that_matter(verdict)
        (axes,) = plot.figure.axes
        assert [text.get_text() for text in axes.texts][words:] == ["60 of 80 stay"]
        assert len(axes.patches) == words + 2
        assert plot.alt.endswith("Of neuron 0, 60 of 80 stay.")
        assert in_small(verdict).rows[-1] == "1" * 9 + "0" * 3
