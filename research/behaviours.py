"""Does what a head looks at say what it does? `python research/behaviours.py FOLDER`.

Of the 270 heads of SmolLM2 the attention to the first token, the previous one, duplicates, and what came after them
(induction; see `examples/models/mhaprune_models/behaviours.py`) stands beside what seven skills lose without the head
(`heads.profile("attribution")`, 64 texts of each). FOLDER/behaviours.csv has a row for each draw, behaviour and skill:
how many heads put at least 0.4 of their attention there, how many of these the skill surely needs, how many that it
needs do so, and how often a head that does so is needed more than one that does not (0.5 is chance). Each draw takes
other texts. Needs pip install -e '.[hf]' -e examples/models and what examples/models/pyproject.toml names for smollm2.
A draw takes two minutes on one core.

Made docs/findings/skills.md.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from mhaprune_models.behaviours import BEHAVIOURS, behaviours
from mhaprune_models.smollm2 import SKILLS, Smollm2

import mhaprune
from draws import over_draws
from mhaprune.storage.store import make_folder
from mhaprune.tables import HEAD, KIND

CLEAR = 0.4
"""The share of attention from which a head is said to look there."""
VOCABULARY = range(1000, 40_000)


def area(does: pd.Series, score: pd.Series) -> float:
    """Return how often a head that does it has a larger score than one that does not; ties count half."""
    ranks = score.rank()
    count, other = int(does.sum()), int((~does).sum())
    return float((ranks[does].sum() - count * (count + 1) / 2) / (count * other)) if count and other else float("nan")


def of_draw(folder: Path, draw: int, texts: int) -> pd.DataFrame:
    read: Any = Smollm2(score=len(SKILLS) * texts, choose=14, report=14, draw=draw).read(
        None, "skills", str(folder / "cache")
    )
    loss, quality = read.objective
    given: Any = {"score": read.splits["score"], "quality": quality, "call": read.call}
    heads: Any = mhaprune.wrap(read.model, loss, **given)
    seen = behaviours(heads, VOCABULARY, seed=draw).set_index(HEAD)
    rows = []
    for kind, profile in heads.profile().groupby(KIND, sort=False):
        profile = profile.set_index(HEAD).reindex(seen.index)
        needed = profile["verdict"] == "needed"
        for name in BEHAVIOURS:
            does = seen[name] >= CLEAR
            row = {
                "behaviour": name,
                "skill": kind,
                "heads": int(does.sum()),
                "needed": int(needed.sum()),
            }
            rows.append(row | {"both": int((does & needed).sum()), "area": area(does, profile["score"])})
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--texts", type=int, default=64, help="of each skill")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder = make_folder("FOLDER", chosen.folder)
    made = partial(of_draw, folder, texts=chosen.texts)
    table = over_draws(folder / "behaviours.csv", range(chosen.draws), made)
    shown = table.groupby(["behaviour", "skill"], sort=False)[["heads", "needed", "both", "area"]].agg(["mean", "std"])
    print(shown.round(2).to_string())


if __name__ == "__main__":
    main()
