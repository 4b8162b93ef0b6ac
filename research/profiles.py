"""Does a profile by derivatives say what exact ablation says? `python research/profiles.py FOLDER`.

For some skills of SmolLM2 (see `examples/models/mhaprune_models/skills.py`) every head is closed by itself, and the
verdicts of `heads.profile("attribution")` are set beside those of `heads.profile("ablation")` on the same texts: how
many are confirmed, contradicted or left open, and the rank correlation. FOLDER then holds `profiles.csv`. Needs
pip install -e '.[hf]' -e examples/models and what examples/models/pyproject.toml names for smollm2. With 24 texts of
three skills it takes a quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from mhaprune_models.smollm2 import SKILLS, Smollm2

import mhaprune
from mhaprune.lab.reporting.agreement import spearman
from mhaprune.storage.store import make_folder, write_bytes


def compared(read: Any, kinds: list[str]) -> pd.DataFrame:
    loss, quality = read.objective
    given: Any = {"score": {kind: read.splits["score"][kind] for kind in kinds}}
    heads = mhaprune.wrap(read.model, loss, quality=quality, call=read.call, **given)
    estimated, exact = (heads.profile(scorer) for scorer in ("attribution", "ablation"))
    rows = []
    for kind in kinds:
        ours, theirs = (table[table["kind"] == kind].reset_index(drop=True) for table in (estimated, exact))
        row: dict[str, Any] = {"kind": kind, "spearman": spearman(ours["score"].to_numpy(), theirs["score"].to_numpy())}
        for verdict, opposite in (("needed", "hurts"), ("hurts", "needed")):
            mine = theirs["verdict"][ours["verdict"] == verdict]
            row |= {verdict: len(mine), f"{verdict}_confirmed": int((mine == verdict).sum())}
            row |= {f"{verdict}_contradicted": int((mine == opposite).sum())}
            row |= {
                f"{verdict}_of_sign": int((theirs["score"][mine.index] * (1 if verdict == "needed" else -1) > 0).sum())
            }
            row |= {f"{verdict}_exact": int((theirs["verdict"] == verdict).sum())}
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--kinds", nargs="+", default=["agreement", "giving", "counting"], choices=SKILLS)
    parser.add_argument("--texts", type=int, default=24, help="of each kind")
    parser.add_argument("--draw", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder = make_folder("FOLDER", chosen.folder)
    size = len(SKILLS) * chosen.texts
    read = Smollm2(score=size, choose=14, report=14, draw=chosen.draw).read(None, "skills", str(folder / "cache"))
    table = compared(read, chosen.kinds)
    write_bytes(folder / "profiles.csv", table.to_csv(index=False).encode())
    print(table.round(3).T.to_string())


if __name__ == "__main__":
    main()
