"""Is one backward pass enough for other questions? `python research/patching_again.py FOLDER`.

Two tasks of SmolLM2 that no other finding read, years (Hanna et al. 2023) and pronouns (Mathwin et al. 2023): all 270
heads are patched exactly on 64 pairs, and `attribution_patching` estimates the same from the same pairs, and from 64
others. FOLDER/patching_again.csv has the rank correlation, how many of the first 10 and 16 heads are the same, and how
often the model is right. Needs pip install -e '.[hf]' -e examples/models and what examples/models/pyproject.toml names
for smollm2. It takes a quarter of an hour on one core.

Made docs/findings/truth.md.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from mhaprune_models.smollm2 import Smollm2

import mhaprune
from mhaprune.lab.reporting.agreement import spearman
from mhaprune.storage.store import make_folder, write_bytes

TASKS = ("years", "pronouns")


def scores(folder: Path, task: str, pairs: int, draw: int, *scorers: str) -> tuple[pd.DataFrame, float]:
    """Return the scores of all heads, a column for each scorer, and the share of texts that the model has right."""
    read: Any = Smollm2(score=pairs, choose=2, report=2, draw=draw).read(None, task, str(folder / "cache"))
    loss, quality = read.objective
    given: Any = dict.fromkeys(("score", "report"), read.splits["score"]) | {"corrupt": read.corrupt["score"]}
    heads: Any = mhaprune.wrap(read.model, loss, quality=quality, call=read.call, prove="none", **given)
    table = heads.score(*scorers)
    wide = pd.DataFrame({name: rows["score"].to_numpy() for name, rows in table.groupby("scorer", sort=False)})
    return wide, heads.evaluate()["quality"].iloc[0]


def compared(folder: Path, task: str, pairs: int) -> dict[str, Any]:
    here, right = scores(folder, task, pairs, 0, "patching", "attribution_patching", "taylor", "gate_output")
    here["on other pairs"] = scores(folder, task, pairs, 1, "attribution_patching")[0]["attribution_patching"]
    first = {name: {*here[name].abs().nlargest(16).index} for name in here}
    ten = {name: {*here[name].abs().nlargest(10).index} for name in here}
    row: dict[str, Any] = {"task": task, "pairs": pairs, "right": right}
    for name in here.columns.drop("patching"):
        row |= {f"{name}: spearman": spearman(here["patching"].to_numpy(), here[name].to_numpy())}
        row |= {
            f"{name}: of 10": len(ten[name] & ten["patching"]),
            f"{name}: of 16": len(first[name] & first["patching"]),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--pairs", type=int, default=64)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder, rows = make_folder("FOLDER", chosen.folder), list[dict[str, Any]]()
    for task in TASKS:
        rows.append(compared(folder, task, chosen.pairs))
        write_bytes(folder / "patching_again.csv", pd.DataFrame(rows).to_csv(index=False).encode())
        print(rows[-1], file=sys.stderr)
    print(pd.DataFrame(rows).round(3).T.to_string())


if __name__ == "__main__":
    main()
