"""What the figures of `experiment=explain` show of a made-up model."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex

from mhaprune.heads import HeadId
from mhaprune.lab.experiments.explain.explain import Explain, closed_table
from mhaprune.lab.experiments.explain.explain_report import NO_PATTERN, attention_maps, head_profiles, scale_of
from mhaprune.lab.reporting.heat_map import MISSING
from mhaprune.lab.reporting.plots import draw
from mhaprune.tables import HEAD
from support.figures import check_legible
from support.made_tables import text_of


class Answers(NamedTuple):
    loss: torch.Tensor
    quality: torch.Tensor


HEADS = [("decoder_self", 0, 0), ("cross", 0, 0), ("cross", 0, 1)]
NAMES = [("symbol to write", "=write"), ("", ""), ("everywhere", "")]
SHARES = {
    "decoder_self": {"i": (0.5, 0.3), "=write": (0.9, 0.2)},
    "cross": {"i": (0.31, 0.3), "i+1": (0.1, 0.2), "=write": (0.2, 0.2)},
}
"""By site and pattern: the share of the attention, and that of a head that looks everywhere alike."""


WORDS = {"i": "the symbol", "i+1": "the next", "=write": "what to write"}


def tables() -> dict[str, pd.DataFrame]:
    looks = pd.DataFrame(HEADS, columns=HEAD).assign(
        removed=False, scorer="ablation", score=[0.5, 0.1, 0.0], rank=[1, 2, 3], prunable=[False, False, True]
    )
    looks = looks.assign(quality=0.5, open_quality=1.0, entropy=1.0, tolerance=0.01, without_prunable=1.0)
    looks["name"], looks["pattern"] = zip(*NAMES, strict=True)
    patterns = [
        dict(zip(HEAD, head, strict=True)) | {"pattern": name, "meaning": WORDS[name], "mass": mass, "chance": chance}
        for head in HEADS
        for name, (mass, chance) in SHARES[head[0]].items()
    ]
    examples = pd.DataFrame([{"example": 0, "source": "3 1", "answer": "1 3", "right_answer": "1 3"}])
    attention = pd.concat([attention_of(head) for head in HEADS], ignore_index=True)
    tables = {"looks": looks, "patterns": pd.DataFrame(patterns), "attention": attention, "examples": examples}
    return tables | {"heads": looks.assign(draw=0, stderr=0.01, skewness=0.0)}


def attention_of(head: tuple[str, int, int], largest: float = 0.4, size: int = 4) -> pd.DataFrame:
    """Every query has its `largest` weight on the first key; the decoder sees what was written before."""
    rows = []
    for query in range(size):
        keys = query + 1 if head[0] == "decoder_self" else size
        weights = [1.0] if keys == 1 else [largest, *([(1 - largest) / (keys - 1)] * (keys - 1))]
        for key in range(size):
            weight = weights[key] if key < keys else 0.0
            rows.append({"query": query, "key": key, "reads": "1", "writes": "3", "looks_at": "1", "weight": weight})
    return pd.DataFrame(rows).assign(example=0, **dict(zip(HEAD, head, strict=True)))


def test_a_profile_shows_what_a_head_does_more_than_an_even_one_and_says_where_it_has_no_name() -> None:
    """A site whose heads follow no pattern is left out, as are the patterns that no head follows."""
    found = tables()
    (profiles,) = draw((head_profiles,), found)
    check_legible(profiles)
    (axes,) = profiles.figure.axes
    assert profiles.caption.endswith("Left out, because no head follows a pattern: cross-attention.")
    cross = (found["patterns"]["site"] == "cross") & (found["patterns"]["pattern"] == "i+1")
    found["patterns"].loc[cross, "mass"] = [0.26, 0.21]
    (profiles,) = draw((head_profiles,), found)
    check_legible(profiles)
    assert profiles.figure.get_suptitle() == "1 of the 2 heads that may matter follows a clear pattern"
    said, columns, written, colours = [], [], [], []
    for axes in profiles.figure.axes:
        columns.append([" ".join(label.get_text().split()) for label in axes.get_xticklabels()])
        said += [text.get_text() for text in axes.texts if text.get_position()[0] > 1.5]
        inside = [text for text in axes.texts if text.get_position()[0] < 1.5]
        written.append({tuple(map(int, text.get_position()[::-1])): text.get_text() for text in inside})
        colours.append(np.ma.filled(axes.images[0].get_array(), np.nan))
    assert said == ["0.500   symbol to write", f"0.100   {NO_PATTERN}", "0   spread evenly"]
    assert columns == [["the symbol", "what to write"], ["the next"]]
    assert written == [{(0, 0): "+20", (0, 1): "+70"}, {(0, 0): "+6"}], "1 point more is not worth a number"
    np.testing.assert_allclose(colours[0], [[0.2, 0.7]])
    np.testing.assert_allclose(colours[1], [[0.06], [0.01]])
    assert len({axes.images[0].get_clim() for axes in profiles.figure.axes}) == 1, "one scale"


def test_what_is_said(snapshot: Any) -> None:
    found = tables()
    found["looks"] = found["looks"].assign(quality_low=0.4, quality_high=0.6, loss_rise=[0.5, 0.1, 0.0])
    found["looks"] = found["looks"].assign(turned_wrong=[30, 4, 0], examples=60)
    meaning = found["patterns"]["pattern"].map({"=write": "symbol to write"}).fillna("other")
    found["patterns"] = found["patterns"].assign(meaning=meaning, largest=0.8)
    right = found["examples"] = found["examples"].assign(ended=True, symbols=2, trained_symbols=10)
    wrong = {"example": "3 1 -> 1 3", "said_without_it": "e" * 64}
    found["wrong"] = pd.DataFrame([dict(zip(HEAD, HEADS[0], strict=True)) | wrong])
    wrong, endless = right.assign(right_answer="9 9"), right.assign(answer=" ".join("0" * 64), ended=False, symbols=12)
    text = {name: frame for name, frame in found.items() if name != "wrong"}
    cases = {
        "an example of the task": found,
        "a wrong answer": found | {"examples": wrong},
        "an answer without an end, to a source that is too long": found | {"examples": endless},
        "no answer is known": found | {"examples": right.assign(right_answer=None)},
        "a text": text | {"examples": right[["example", "source"]]},
    }
    snapshot("explain", {name: Explain.say(case) for name, case in cases.items()})


def test_the_darkest_weight_is_the_largest_one_where_there_is_a_choice() -> None:
    """The first query of a decoder sees one key, so that its weight is 1 and says nothing."""
    for largest, top in ((0.42, 0.45), (0.6, 0.6), (1.0, 1.0)):
        shown = pd.concat([attention_of(HEADS[1], largest), attention_of(HEADS[1], 0.3)])
        assert scale_of(shown)["vmax"] == pytest.approx(top)
    even = attention_of(HEADS[1], 0.1, size=10)
    assert scale_of(even)["vmax"] == 0.3, "or a difference of a point would look large"
    assert scale_of(attention_of(HEADS[0], size=1))["vmax"] == 1, "no choice at all"
    decoder = attention_of(HEADS[0], 0.55)
    decoder.loc[(decoder["query"] == 1) & (decoder["weight"] > 0), "weight"] = 0.9, 0.1
    assert decoder["weight"].max() == 1
    assert scale_of(decoder)["vmax"] == pytest.approx(0.55), "a query with half of the keys has no choice either"


def test_a_site_of_very_many_heads_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhaprune.lab.experiments.explain.explain_report.MOST_PANELS", 0)
    assert not list(draw((attention_maps,), tables()))


def test_all_maps_share_a_scale_and_say_where_it_is_cut_and_what_is_forbidden_is_grey() -> None:
    plots = {plot.name: plot for plot in draw((attention_maps,), tables())}
    cut, whole = plots["attention-0-decoder_self"], plots["attention-0-cross"]
    assert "(darkest: 0.4 or more)" in cut.caption
    assert "darkest" not in whole.caption
    weights = np.ma.filled(cut.figure.axes[0].images[0].get_array(), np.nan)
    np.testing.assert_array_equal(np.isnan(weights), np.triu(np.ones((4, 4)), 1) == 1)
    assert to_hex(cut.figure.axes[0].get_facecolor()) == MISSING
    for plot, top, extend in ((cut, 0.4, "max"), (whole, 0.4, "neither")):
        images = [axes.images[0] for axes in plot.figure.axes if axes.images]
        assert {image.get_clim() for image in images} == {(0, top)}
        bar = images[-1].colorbar
        assert bar is not None
        assert bar.extend == extend
        check_legible(plot)
    assert NO_PATTERN in text_of(whole)


def test_what_all_heads_do_is_said_once() -> None:
    found = tables()
    found["looks"] = found["looks"].assign(name="next", pattern="i+1")
    (profiles,) = draw((head_profiles,), found)
    assert profiles.figure.get_suptitle() == "3 of 3 heads look mostly at the next"
    even = {"attention": pd.concat([attention_of(HEADS[1], 0.25), attention_of(HEADS[2], 0.3)])}
    (cross,) = draw((attention_maps,), found | even)
    assert "no weight is more than 0.05 from an even one" in cross.caption
    assert not any("even one" in plot.caption for plot in draw((attention_maps,), found))


def test_a_quality_that_is_no_yes_or_no_turns_nothing_wrong() -> None:
    """Similarity falls a little without any head, so all examples would turn wrong."""
    quality = torch.tensor([[0.9, 0.8], [0.8, 0.7]])
    table = closed_table([HeadId("cross", 0, 0)], Answers(torch.zeros(2, 2), quality))
    assert table["quality"].tolist() == pytest.approx([0.75])
    assert "turned_wrong" not in table
