"""Attention that can be touched: its data, and what a browser makes of it."""

import base64
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mhaprune.lab.reporting.attention_view import FINEST, MOST_WEIGHTS, view_of
from mhaprune.lab.reporting.head_map import REMOVED, Verdict
from mhaprune.lab.reporting.page import FirstScreen, render
from support.browser import after, needs_browser
from support.sizes import slow

TOKENS = ["<bos>", "</script><b>", "b"]


def made(heads: int = 2, tokens: int = 3, layers: int = 1) -> dict[str, pd.DataFrame]:
    """One example with causal weights: row i looks at i with half of its attention, and equally at those before."""
    names = [TOKENS[i] if i < 3 else f"t{i}" for i in range(tokens)]
    weights = np.tril(np.ones((tokens, tokens)))
    weights /= 2 * np.maximum(weights.sum(axis=1, keepdims=True) - 1, 1)
    np.fill_diagonal(weights, 0.5)
    weights[0, 0] = 1
    places = {"query": np.repeat(range(tokens), tokens), "key": np.tile(range(tokens), tokens)}
    read = {"reads": np.repeat(names, tokens), "looks_at": np.tile(names, tokens), "weight": weights.flatten()}
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    ids = [{"example": 0, "site": "decoder_self", "layer": layer, "head": head} for layer, head in every]
    answers = ["b a", "b c"] * len(ids)
    return {
        "attention": pd.concat([pd.DataFrame({**id_, **places, **read}) for id_ in ids], ignore_index=True),
        "examples": pd.DataFrame([{"example": 0, "source": "a <b>", "answer": "b a", "right_answer": "b a"}]),
        "closed": pd.DataFrame([id_ | {"answer": answer} for id_, answer in zip(ids, answers, strict=False)]),
        "looks": pd.DataFrame(ids).assign(quality=0.25, open_quality=1.0),
    }


def verdict(heads: int = 2, layers: int = 1) -> Verdict:
    every = [("decoder_self", layer, head) for layer in range(layers) for head in range(heads)]
    table = pd.DataFrame(every, columns=["site", "layer", "head"]).assign(stays=True, name="")
    table["score"] = np.arange(len(table), 0.0, -1)
    table.loc[len(table) - 1, "stays"] = False
    return Verdict(table, "ablation", "", "")


def view(tables: dict[str, pd.DataFrame], decided: Verdict) -> dict[str, Any]:
    found = view_of(tables, decided)
    assert found is not None
    return found


def weights_in(found: dict[str, Any], head: str, keys: int) -> np.ndarray:
    [example] = found["examples"]
    coded = np.frombuffer(base64.b64decode(example["weights"][head]), dtype="<u2")
    return coded.reshape(-1, keys) / FINEST


def test_weights_have_five_digits_and_only_a_weight_of_zero_is_zero() -> None:
    found = view(made(), verdict())
    assert [tile["name"] for tile in found["heads"]] == ["decoder_self.0.0", "decoder_self.0.1"]
    assert [tile["stays"] for tile in found["heads"]] == [True, False]
    assert [tile["undecided"] for tile in found["heads"]] == [False, False]
    unsure = verdict()
    unsure.heads["undecided"] = [True, False]
    assert [tile["undecided"] for tile in view(made(), unsure)["heads"]] == [True, False]
    assert found["cut"] == ""
    exact = [[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]]
    np.testing.assert_allclose(weights_in(found, "decoder_self.0.1", 3), exact, atol=1e-5)
    tiny = made()
    tiny["attention"]["weight"] *= 1e-9
    assert (weights_in(view(tiny, verdict()), "decoder_self.0.1", 3)[:2] > 0).tolist() == [
        [True, False, False],
        [True, True, False],
    ]
    assert found["examples"][0]["tokens"]["decoder_self.0"]["keys"] == ["begin", "</script><b>", "b"]


def test_the_largest_weight_is_that_of_the_model_however_small_its_lead() -> None:
    """In a row and in a column, although both weights are shown by the same digits."""
    tables = made()
    first = tables["attention"]["head"] == 0
    tables["attention"].loc[first, "weight"] = [1 / 3, 1 / 3 - 1e-7, 1 / 3 + 1e-7, 0.2, 0.5, 0.3, 0.2, 0.5 + 1e-8, 0.3]
    found = view(tables, verdict())
    assert found["examples"][0]["largest"]["decoder_self.0.0"] == [[2, 1, 1], [0, 2, 0]]
    assert len(set(weights_in(found, "decoder_self.0.0", 3)[0])) == 1


@pytest.mark.parametrize(
    ("heads", "layers", "tokens", "shown", "said"),
    [
        (2, 1, 500, 2, "the first 447 of 500 tokens"),
        *slow((64, 26, 20, 1562, "the 1562 most important of 1664 heads and the first 16 of 20 tokens")),
    ],
)
def test_a_long_text_and_many_heads_are_cut_and_said(
    heads: int, layers: int, tokens: int, shown: int, said: str
) -> None:
    found = view(made(heads, tokens, layers), verdict(heads, layers))
    assert len(found["heads"]) == shown
    assert found["cut"] == said
    assert found["heads"][0]["name"] == "decoder_self.0.0", "the most important one stays"
    assert len(json.dumps(found)) < 2.67 * MOST_WEIGHTS + 480 * shown + 20_000


def test_the_length_of_a_text_that_was_cut_before_is_known() -> None:
    tables = made()
    tables["examples"]["symbols"] = 2000
    assert view(tables, verdict())["cut"] == "the first 3 of 2000 tokens"


def test_without_attention_or_a_map_there_is_none() -> None:
    assert view_of({name: table for name, table in made().items() if name != "closed"}, verdict()) is None
    assert view_of(made(), None) is None
    gone = verdict()
    gone.heads.loc[0, "name"] = REMOVED
    assert [tile["name"] for tile in view(made(), gone)["heads"]] == ["decoder_self.0.1"]


def test_of_a_model_without_answers_quality_and_loss_are_said() -> None:
    tables = made()
    tables["closed"] = tables["closed"].drop(columns="answer").assign(quality=0.5, open_quality=1.0, loss_rise=0.25)
    tables["examples"] = tables["examples"][["example", "source"]]
    [example] = view(tables, verdict())["examples"]
    words = "exact match 50.0 % instead of 100.0 %, the loss changes by 0.2500 nats"
    assert example["without"]["decoder_self.0.1"] == {"words": words}


def page() -> str:
    return render("t", ["found"], [], {}, {}, first=FirstScreen("asked?", view=view(made(), verdict())))


def test_tokens_are_no_markup_of_the_page() -> None:
    html = page()
    assert "</script><b>" not in html
    [data] = re.findall('id="touch-data">(.*?)</script>', html)
    assert json.loads(data)["examples"][0]["tokens"]["decoder_self.0"]["keys"][1] == "</script><b>"
    assert re.search('<section id="touch" class="touch" hidden>', html), "a page without scripts shows none of it"


@needs_browser
def test_a_browser_shows_where_a_token_looks_and_who_looks_at_it(tmp_path: Path) -> None:
    now = 'document.querySelector(".tv-now").textContent'
    said = unescape(after(page(), f"return {now}", tmp_path))
    assert (
        said
        == "“</script><b>” (position 1, counted from 0) looks most at “begin” (position 0), with 50 % of its attention."
    )
    point = 'document.querySelectorAll(".tv-chips")[{}].querySelectorAll("button")[{}].dispatchEvent(new Event("{}"));'
    looked = after(page(), point.format(1, 0, "focus") + f"return {now}", tmp_path)
    assert looked == "“begin” (position 0, counted from 0) gets most from “begin” (position 0), 100 % of its attention."
    looking = after(page(), point.format(0, 2, "mouseenter") + f"return {now}", tmp_path)
    assert looking == "“b” (position 2, counted from 0) looks most at “b” (position 2), with 50 % of its attention."
    box = 'const box = document.querySelector("input"); box.checked = true; box.dispatchEvent(new Event("change"));'
    assert after(page(), 'return document.querySelector("input").offsetParent !== null', tmp_path) == "true"
    rest = after(page(), box + point.format(0, 2, "focus") + f"return {now}", tmp_path)
    assert rest.endswith("looks most at “b” (position 2), with 67 % of its attention to other tokens than the first.")


@needs_browser
def test_a_colour_means_one_share_of_attention_on_the_whole_page(tmp_path: Path) -> None:
    """Even attention is pale, for a head whose largest weight is small too, in the tokens and in the map of weights."""
    tables = made(tokens=8)
    even, every = tables["attention"]["head"] == 1, tables["attention"]["weight"]
    tables["attention"]["weight"] = every.where(~even, 1 / 8)
    html = render("t", ["found"], [], {}, {}, first=FirstScreen("asked?", view=view(tables, verdict())))
    tile, chips = (
        'document.querySelectorAll(".tv-map button")[1].click();',
        '[...document.querySelectorAll(".tv-chips")]',
    )
    mixed = f'{chips}[1].querySelector("button").style.background.match(/[0-9.]+%/)[0]'
    assert after(html, f"{tile} return {mixed}", tmp_path) == "12.5%"
    thumbnail = 'document.querySelectorAll(".tv-map canvas")[1].getContext("2d").getImageData(7, 7, 1, 1).data[3]'
    assert after(html, f"return {thumbnail}", tmp_path) == "32", "an eighth of 255"
    last = "c.getContext('2d').getImageData(c.width - 8, c.height - 8, 1, 1).data.join()"
    pale = after(html, f"{tile} const c = document.querySelector('.tv-main canvas'); return {last}", tmp_path)
    assert min(map(int, pale.split(",")[:3])) > 200, "an eighth of blue on white"


@needs_browser
def test_a_head_is_chosen_closed_and_opened_by_mouse_and_keyboard(tmp_path: Path) -> None:
    says = 'document.querySelector(".tv-title b").textContent + ": " + document.querySelector(".tv-answer").textContent'
    tile = 'document.querySelectorAll(".tv-map button")[{}].click();'
    assert after(page(), f"return {says}", tmp_path) == "decoder_self.0.0: a &lt;b&gt; → b a (right)"
    chosen = after(page(), tile.format(1) + f"return {says}", tmp_path)
    assert chosen == "decoder_self.0.1: a &lt;b&gt; → b a (right)"
    button = 'document.querySelector(".tv-title button").click();'
    assert after(page(), 2 * tile.format(1) + f"return {says}", tmp_path) == chosen, "a double click closes nothing"
    closed = after(page(), tile.format(1) + button + f"return {says}", tmp_path)
    said = "decoder_self.0.1: a &lt;b&gt; → b c (wrong, it is b a) without this head. On the whole report split 25.0 % "
    assert closed == said + "of the answers are right (100.0 % with all heads)."
    assert after(page(), tile.format(1) + 2 * button + f"return {says}", tmp_path) == chosen
    pressed = 'new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true})'
    arrow = f'document.querySelector(".tv-map button").dispatchEvent({pressed});'
    assert after(page(), f"{arrow} return {says}", tmp_path) == chosen
    assert after(page(), f"{arrow} return document.activeElement.title", tmp_path) == "decoder_self.0.1: ablation 1.000"


@needs_browser
def test_it_fits_a_phone(tmp_path: Path) -> None:
    wide = "return document.documentElement.scrollWidth <= innerWidth"
    assert after(page(), wide, tmp_path, width=400) == "true"
