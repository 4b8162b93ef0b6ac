"""Seven skills of a language model, as texts of which a part is asked for: made by rule, or Python's own files.

Dimensions: B = batch, T = tokens.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from mhaprune.subjects.batches import IGNORED

Text = tuple[tuple[int, ...], int]
"""The tokens of a text, and the number of the first that is asked for."""

CAPITALS = """
France Paris, Italy Rome, Spain Madrid, Germany Berlin, Greece Athens, Japan Tokyo, China Beijing, Russia Moscow,
Egypt Cairo, Kenya Nairobi, Peru Lima, Chile Santiago, Cuba Havana, Norway Oslo, Sweden Stockholm, Finland Helsinki,
Denmark Copenhagen, Poland Warsaw, Austria Vienna, Hungary Budapest, Ireland Dublin, Portugal Lisbon, Belgium
Brussels, Turkey Ankara, Iran Tehran, Iraq Baghdad, Syria Damascus, Lebanon Beirut, Thailand Bangkok, Vietnam Hanoi,
Canada Ottawa, Australia Canberra, Ukraine Kyiv, Romania Bucharest, Bulgaria Sofia, Serbia Belgrade, Croatia Zagreb,
Iceland Reykjavik, Scotland Edinburgh, Wales Cardiff, England London, Afghanistan Kabul, Pakistan Islamabad, Nepal
Kathmandu, Libya Tripoli, Tunisia Tunis, Algeria Algiers, Morocco Rabat, Ghana Accra, Ecuador Quito, Venezuela
Caracas, Colombia Bogota
"""
SYMBOLS = """
hydrogen H, helium He, carbon C, nitrogen N, oxygen O, sodium Na, magnesium Mg, silicon Si, chlorine Cl, potassium K,
calcium Ca, iron Fe, copper Cu, zinc Zn, silver Ag, tin Sn, gold Au, mercury Hg, lead Pb, uranium U, sulfur S, neon
Ne, nickel Ni, cobalt Co, argon Ar, lithium Li, boron B, fluorine F, aluminum Al, phosphorus P, titanium Ti, platinum
Pt
"""
OPPOSITES = """
hot cold, big small, up down, left right, day night, black white, open closed, old new, fast slow, high low, rich
poor, happy sad, light dark, full empty, hard soft, wet dry, early late, strong weak, good bad, true false, first
last, inside outside, loud quiet, thick thin, clean dirty, heavy light, long short, easy difficult, alive dead, cheap
expensive, deep shallow, sweet bitter, young old, near far, above below, love hate, win lose, buy sell, push pull,
begin end, accept reject, increase decrease, success failure, war peace, north south, east west, summer winter
"""
LANGUAGES = """
France French, Italy Italian, Spain Spanish, Germany German, Greece Greek, Japan Japanese, China Chinese, Russia
Russian, Poland Polish, Sweden Swedish, Denmark Danish, Norway Norwegian, Finland Finnish, Hungary Hungarian, Turkey
Turkish, Portugal Portuguese, Brazil Portuguese, Mexico Spanish, Thailand Thai, Vietnam Vietnamese
"""
FACTS = {
    "The capital of {} is": CAPITALS,
    "The chemical symbol for {} is": SYMBOLS,
    "The opposite of {} is": OPPOSITES,
    "People in {} speak": LANGUAGES,
}
MODULES = (
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "csv",
    "dataclasses",
    "datetime",
    "difflib",
    "inspect",
    "textwrap",
)
"""Modules of Python whose source is read as code."""
LENGTH, COPIED = 48, 12
"""Tokens of a text of code or prose, and random tokens that are repeated."""


def facts(draw: random.Random, tokenizer: Any) -> Iterator[Text]:
    """Yield facts, each once."""
    known = [
        (frame.format(pair.split()[0]), pair.split()[1]) for frame, pairs in FACTS.items() for pair in pairs.split(",")
    ]
    draw.shuffle(known)
    return (_asked(tokenizer, text, f" {answer}") for text, answer in known)


def counting(draw: random.Random, tokenizer: Any) -> Iterator[Text]:
    """Yield four numbers with equal steps and ask for the next one."""
    starts = list(product(range(1, 90), range(1, 6)))
    draw.shuffle(starts)
    return (
        _asked(tokenizer, "".join(f"{start + step * i}, " for i in range(4)).strip(), f" {start + 4 * step}")
        for start, step in starts
    )


def copying(draw: random.Random, tokenizer: Any) -> Iterator[Text]:
    """Yield random tokens, all of them twice; the first of the second half cannot be known."""
    while True:
        first = [draw.randrange(1000, 40_000) for _ in range(COPIED)]
        yield (*first, *first), COPIED + 1


def code(draw: random.Random, tokenizer: Any) -> Iterator[Text]:
    """Yield pieces of the source of Python's library."""
    return _pieces([inspect.getsource(importlib.import_module(name)) for name in MODULES], draw, tokenizer)


def prose(draw: random.Random, tokenizer: Any) -> Iterator[Text]:
    """Yield pieces of Python's help."""
    return _pieces([topics[topic] for topic in sorted(topics)], draw, tokenizer)


def _pieces(texts: Sequence[str], draw: random.Random, tokenizer: Any) -> Iterator[Text]:
    ids = [token for text in texts for token in tokenizer(text).input_ids]
    starts = list(range(0, len(ids) - LENGTH, LENGTH))
    draw.shuffle(starts)
    return ((tuple(ids[at : at + LENGTH]), 1) for at in starts)


def _asked(tokenizer: Any, text: str, answer: str) -> Text:
    ids = tokenizer(text).input_ids
    return (*ids, *tokenizer(answer).input_ids), len(ids)


def of_rule(
    rule: Callable[[random.Random], tuple[str, str, str, str]],
) -> Callable[[random.Random, Any], Iterator[Text]]:
    """Return the texts of a rule that makes a text, a counterpart, and the right and wrong next word."""

    def made(draw: random.Random, tokenizer: Any) -> Iterator[Text]:
        while True:
            text, _, right, _ = rule(draw)
            yield _asked(tokenizer, text, right)

    return made


def batch_of(texts: Sequence[Text]) -> dict[str, Tensor]:
    """Return texts as a batch: `input_ids`, `attention_mask` and `labels`, (B, T). Padding is on the right."""
    longest = max(len(ids) for ids, _ in texts)
    rows = [list(ids) + [0] * (longest - len(ids)) for ids, _ in texts]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in texts]
    labels = torch.full((len(texts), longest), IGNORED)
    for row, (ids, begin) in zip(labels, texts, strict=True):
        row[begin : len(ids)] = torch.tensor(ids[begin:])
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask), "labels": labels}
