"""What a head is said to look at is what it looks at."""

import pandas as pd
import pytest
import torch
from torch import Tensor

from mhaprune.heads import BlockId, HeadGrid
from mhaprune.lab.experiments.explain.patterns import PATTERNS, PLACES, View, named_after, observe
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.reverse import Reverse
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.subject import AttentionMap

TASK = Reverse(num_symbols=6, max_length=6, min_length=3, train=40, valid=8, score=8, choose=8, report=30)


class Staring:
    """A subject whose heads look at exactly one pattern each: a head per pattern of every site."""

    def __init__(self) -> None:
        self.grid = HeadGrid.full((BlockId(site, 0) for site in Site), max(map(len, PATTERNS.values())))

    def attention_maps(self, batch: Examples) -> dict[BlockId, AttentionMap]:
        maps = {}
        for block in self.grid.blocks:
            view, weights = View.of(block.site, batch), []
            for pattern in PATTERNS[block.site]:
                weights.append(_evenly_on(PLACES[pattern](view) & view.allowed, view.allowed))
            weights += [_evenly_on(view.allowed, view.allowed)] * (len(self.grid) // 3 - len(weights))
            valid = view.reads != 0
            maps[block] = AttentionMap(torch.stack(weights, dim=1), valid, view.keys != 0)
        return maps


def _evenly_on(there_BTU: Tensor, allowed_BTU: Tensor) -> Tensor:
    """Attention on those places and, where there are none, everywhere."""
    there_BTU = torch.where(there_BTU.any(dim=2, keepdim=True), there_BTU, allowed_BTU)
    return there_BTU.double() / there_BTU.sum(dim=2, keepdim=True).clamp(min=1)


each_pattern = pytest.mark.parametrize(
    ("site", "pattern"), [(site, pattern) for site, patterns in PATTERNS.items() for pattern in patterns]
)
BY_HAND: dict[Site, dict[str, set[tuple[int, int]]]] = {
    Site.ENCODER_SELF: {
        "i−2": {(2, 0), (3, 1)},
        "i−1": {(1, 0), (2, 1), (3, 2)},
        "i": {(0, 0), (1, 1), (2, 2), (3, 3)},
        "i+1": {(0, 1), (1, 2), (2, 3)},
        "i+2": {(0, 2), (1, 3)},
        "n−i": {(0, 2), (1, 1), (2, 0)},
        "first": {(0, 0), (1, 0), (2, 0), (3, 0)},
        "last": {(0, 2), (1, 2), (2, 2), (3, 2)},
        "end": {(0, 3), (1, 3), (2, 3), (3, 3)},
        "=read": {(0, 2), (2, 0)},
    },
    Site.DECODER_SELF: {
        "i−2": {(2, 0), (3, 1)},
        "i−1": {(1, 0), (2, 1), (3, 2)},
        "i": {(0, 0), (1, 1), (2, 2), (3, 3)},
        "first": {(0, 0), (1, 0), (2, 0), (3, 0)},
        "=read": {(3, 1)},
        "=write": {(2, 1)},
    },
    Site.CROSS: {
        "i−2": {(2, 0), (3, 1)},
        "i−1": {(1, 0), (2, 1), (3, 2)},
        "i": {(0, 0), (1, 1), (2, 2), (3, 3)},
        "i+1": {(0, 1), (1, 2), (2, 3)},
        "i+2": {(0, 2), (1, 3)},
        "n−i−1": {(0, 1), (1, 0)},
        "n−i": {(0, 2), (1, 1), (2, 0)},
        "n−i+1": {(1, 2), (2, 1), (3, 0)},
        "first": {(0, 0), (1, 0), (2, 0), (3, 0)},
        "last": {(0, 2), (1, 2), (2, 2), (3, 2)},
        "end": {(0, 3), (1, 3), (2, 3), (3, 3)},
        "=read": {(1, 0), (1, 2), (2, 1), (3, 0), (3, 2)},
        "=write": {(0, 0), (0, 2), (1, 1), (2, 0), (2, 2)},
    },
}
"""Of 3 1 3 -> 3 1 3: (query, key) where each pattern points to. The decoder reads begin 3 1 3 and writes 3 1 3 end."""


@each_pattern
def test_patterns_point_to_what_a_person_would_point_to(site: Site, pattern: str) -> None:
    """In a batch with a longer example, so that there is padding."""
    batch = TASK.encode([(["3", "1", "3"], ["3", "1", "3"]), (["0", "1", "2", "3", "4"], ["4", "3", "2", "1", "0"])])
    view = View.of(site, batch)
    there = PLACES[pattern](view) & view.allowed
    assert {(query, key) for query, key in there[0].nonzero().tolist()} == BY_HAND[site][pattern]


def test_chance_and_unevenness_of_one_example_by_hand() -> None:
    """Heads of the encoder that look at one of its four tokens each, in an example of three symbols."""
    example = TASK.encode([(["3", "1", "3"], ["3", "1", "3"])])
    patterns, looks = observe(Staring(), example)  # type: ignore[arg-type]
    encoder = patterns[patterns["site"] == "encoder_self"].drop_duplicates("pattern").set_index("pattern")
    assert encoder.loc["i", "chance"] == pytest.approx(1 / 4)
    assert encoder.loc["i−2", "queries"] == 2
    assert encoder.loc["i−2", "applies"] == pytest.approx(1 / 2)
    end = list(PATTERNS[Site.ENCODER_SELF]).index("end")
    look = looks[(looks["site"] == "encoder_self") & (looks["head"] == end)].iloc[0]
    assert look["unevenness"] == pytest.approx(3 / 4)
    assert look["name"] == "end of sequence"
    assert look["pattern"] == "end"


@pytest.fixture(scope="module")
def staring() -> tuple[pd.DataFrame, pd.DataFrame]:
    return observe(Staring(), TASK.splits().report)  # type: ignore[arg-type]


@each_pattern
def test_a_head_that_stares_at_a_pattern_gives_it_all(
    staring: tuple[pd.DataFrame, pd.DataFrame], site: Site, pattern: str
) -> None:
    patterns, looks = staring
    head = list(PATTERNS[site]).index(pattern)
    mine = patterns[(patterns["site"] == site) & (patterns["head"] == head)].set_index("pattern")
    assert mine.loc[pattern, "mass"] == pytest.approx(1)
    assert mine.loc[pattern, "largest"] == pytest.approx(1)
    name = looks[(looks["site"] == site) & (looks["head"] == head)]["name"].item()
    # On `reverse` the symbol to write stands at the reverse position and the one just written after it: the narrower
    # pattern is meant.
    if mine.loc[pattern, "applies"] >= 0.5 and (site, pattern) not in ((Site.CROSS, "=write"), (Site.CROSS, "=read")):
        assert name == PATTERNS[site][pattern]


def test_a_head_that_looks_everywhere_gets_chance_and_says_so(staring: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    patterns, looks = staring
    last = len(PATTERNS[Site.CROSS]) - 1
    even = patterns[(patterns["site"] == Site.DECODER_SELF) & (patterns["head"] == last)]
    pd.testing.assert_series_equal(even["mass"], even["chance"], check_names=False)
    look = looks[(looks["site"] == Site.DECODER_SELF) & (looks["head"] == last)].iloc[0]
    assert look["name"] == "everywhere"
    assert look["unevenness"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("share", "everywhere"), [(0.04, True), (0.2, False)])
def test_hardly_uneven_is_everywhere_and_a_little_uneven_is_not(share: float, everywhere: bool) -> None:
    """Heads that give that share of their attention to a pattern and spread the rest."""

    class Leaning(Staring):
        def attention_maps(self, batch: Examples) -> dict[BlockId, AttentionMap]:
            maps = super().attention_maps(batch)
            even = {block: View.of(block.site, batch).allowed for block in maps}
            spread = {block: _evenly_on(allowed, allowed)[:, None] for block, allowed in even.items()}
            return {b: m._replace(weights=share * m.weights + (1 - share) * spread[b]) for b, m in maps.items()}

    looks = observe(Leaning(), TASK.splits().report).looks.set_index(["site", "head"])  # type: ignore[arg-type]
    look = looks.loc[("encoder_self", list(PATTERNS[Site.ENCODER_SELF]).index("first"))]
    assert (look["name"] == "everywhere") == everywhere


def named(**columns: list[float]) -> str | None:
    return named_after(pd.DataFrame({"meaning": ["a", "b"], "pattern": "p", "applies": 1.0, **columns}))[0] or None


def test_only_a_clear_pattern_names_a_head() -> None:
    clear = {"mass": [0.5, 0.1], "largest": [0.8, 0.1], "chance": [0.1, 0.1]}
    assert named(**clear) == "a"
    assert named(**clear | {"largest": [0.4, 0.1]}) is None, "rarely its largest weight"
    assert named(**clear | {"chance": [0.45, 0.1]}) is None, "hardly more than by chance"
    assert named(**clear | {"applies": [0.2, 1.0]}) is None, "seldom to be had"


SOFT = {
    "even": (lambda shape: 1e-6 * torch.randn(shape), "everywhere"),
    "diagonal": (lambda shape: torch.randn(shape) / 10 + 0.9 * torch.eye(shape[-1]), "symbol just written"),
    "previous": (lambda shape: torch.randn(shape) / 10 + 1.5 * torch.eye(shape[-1]).roll(-1, 1), "last but one symbol"),
    "faint": (lambda shape: torch.randn(shape) / 10 + 0.3 * torch.eye(shape[-1]), ""),
    "random": (lambda shape: torch.randn(shape), ""),
}


@pytest.mark.parametrize("kind", SOFT)
def test_in_a_causal_block_a_soft_pattern_is_named_and_chance_is_not(kind: str) -> None:
    """Few keys are allowed there, so that a clean diagonal has little more than chance."""
    logits, name = SOFT[kind]

    class Soft(Staring):
        def attention_maps(self, batch: Examples) -> dict[BlockId, AttentionMap]:
            maps, view = super().attention_maps(batch), View.of(Site.DECODER_SELF, batch)
            block, allowed = BlockId(Site.DECODER_SELF, 0), view.allowed[:, None]
            torch.manual_seed(0)
            weights = logits(maps[block].weights.shape).double().masked_fill(~allowed, -1e9).softmax(dim=3)
            return {block: maps[block]._replace(weights=weights * allowed)}

    patterns, looks = observe(Soft(), TASK.splits().report)  # type: ignore[arg-type]
    assert set(looks["name"]) == {name}
    if kind == "diagonal":
        own = patterns[patterns["pattern"] == "i"]
        assert (own["mass"] - own["chance"]).max() < 0.2
        assert own["largest"].min() > 0.9


def test_of_two_clear_patterns_the_one_that_points_to_less_names_it() -> None:
    assert named(mass=[0.8, 0.78], largest=[0.9, 0.88], chance=[0.2, 0.1]) == "b"
