"""How much of an effect do the first heads of an order keep? `python research/orders.py FOLDER`.

Heads of SmolLM2 are ordered by first-order estimates of patching on 16 pairs of texts: with derivatives at the text, at
its counterpart, at both, and at points between; beside them random orders. On 16 other pairs the first k heads keep
their outputs, all others get those of the counterpart: the share of the effect that is kept, between that of no head
and of all; 1 is perfect, and more is too much. Each draw takes other pairs of `indirect_object`, `repeats` and
`agreement`. A draw that is in `orders.csv` in FOLDER is not made again. A draw takes a minute and a half.

With --trained STEPS there are also orders of trained gates, at equal passes, in `trained.csv`: `mattr` in so many steps
of four pairs, `subset` and `hard_concrete` for 32 heads in 5/3 as many. What was claimed of them is tested by
`python research/findings.py smollm2_trained_orders`.

Needs pip install -e '.[hf]' -e examples/models -e examples/literature and what examples/models/pyproject.toml names for
smollm2.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from mhaprune_models.smollm2 import Smollm2

import mhaprune
from mhaprune.measure.outcomes import all_open, gate_gradients, measure_masks
from mhaprune.progress import track
from mhaprune.scorers.replacing import corrupted
from mhaprune.storage.store import make_folder, write_bytes
from mhaprune.subjects.batches import Batches
from mhaprune_literature.hard_concrete import HardConcrete
from mhaprune_literature.mattr import Mattr
from mhaprune_literature.subset import Subset

KINDS = ("indirect_object", "repeats", "agreement")
KEPT = (4, 8, 16, 32, 64, 128)
BETWEEN = 8
"""Points of the order that integrates over the way between the two ends."""
RANDOM = 2


def orders(heads: Any, pairs: Any, draw: int) -> Iterator[tuple[str, torch.Tensor, float]]:
    """Yield each order, as scores (N,), by its name, with its backward passes."""
    subject, others, away = heads.subject, pairs.counterpart(), corrupted(pairs)
    points = all_open(subject, BETWEEN + 1) * torch.linspace(1, 0, BETWEEN + 1)[:, None]
    slopes_SN = -gate_gradients(subject, pairs, points, replacement=away).mean(dim=1)
    back_N = gate_gradients(subject, others, replacement=lambda own, batch, at: own.head_outputs(pairs[at])).mean(dim=0)
    weights = torch.ones(BETWEEN + 1, 1, dtype=slopes_SN.dtype)
    weights[[0, -1]] = 0.5
    yield "at the text", slopes_SN[0], 1
    yield "at the counterpart", back_N, 1
    yield "at both", (slopes_SN[0] + back_N) / 2, 2
    yield "all heads replaced", slopes_SN[-1], 1
    yield "at the text and all heads replaced", (slopes_SN[0] + slopes_SN[-1]) / 2, 2
    yield f"{BETWEEN} points", slopes_SN[:-1].mean(dim=0), BETWEEN
    yield f"{BETWEEN + 1} points, both ends", (weights * slopes_SN).sum(dim=0) / BETWEEN, BETWEEN + 1
    for number in range(RANDOM):
        yield f"random {number}", torch.from_numpy(np.random.default_rng([draw, number]).random(len(heads.grid))), 0


def trained(heads: Any, pairs: Any, draw: int, steps: int) -> Iterator[tuple[str, torch.Tensor, float]]:
    """Yield these orders and those of trained gates. A step of `mattr` runs three passes forward and one back,
    one of the others one each; a pass back counts as two."""
    yield from orders(heads, pairs, draw)
    more = round(steps * 5 / 3)
    for name, scorer in (
        (f"mattr, {steps} steps", Mattr(steps=steps, batch_size=4)),
        (f"subset of 32, {more} steps", Subset(keep=32, steps=more, batch_size=4)),
        (f"hard_concrete of 32, {more} steps", HardConcrete(keep=32, steps=more, batch_size=4)),
    ):
        scores = scorer(heads.subject, pairs, draw)
        yield name, scores.values[0], scores.backward_passes


def kept_by(heads: Any, pairs: Any, scores: list[torch.Tensor]) -> np.ndarray:
    """Return the share of the effect that the first heads of each order keep, (orders, sizes)."""
    masks = [torch.zeros(len(heads.grid)), torch.ones(len(heads.grid))]
    for scores_N in scores:
        first = scores_N.argsort(descending=True, stable=True)
        masks += [torch.zeros(len(heads.grid)).scatter(0, first[:k].cpu(), 1.0) for k in KEPT]
    with torch.no_grad():
        loss_M = measure_masks(heads.subject, pairs, torch.stack(masks), corrupted(pairs)).loss.double().mean(dim=1)
    none, every, *rest = loss_M.tolist()
    return ((none - np.array(rest)) / (none - every)).reshape(len(scores), len(KEPT))


def of_draw(kind: str, draw: int, size: int, cache: str, steps: int) -> pd.DataFrame:
    read = Smollm2(score=size, choose=2, report=size, draw=draw, length=12).read(None, kind, cache)
    loss, quality = read.objective
    splits: Any = {name: Batches.of(part, name).with_corrupt(read.corrupt[name]) for name, part in read.splits.items()}
    heads: Any = mhaprune.wrap(read.model, loss, quality=quality, call=read.call, **splits)
    pairs = heads.splits.score
    found = trained(heads, pairs, draw, steps) if steps else orders(heads, pairs, draw)
    names, scores, passes = zip(*found, strict=True)
    shares = kept_by(heads, heads.splits.report, list(scores))
    rows = [
        {"kind": kind, "draw": draw, "order": name, "backward_passes": cost, "kept": k, "share": share}
        for name, cost, row in zip(names, passes, shares, strict=True)
        for k, share in zip(KEPT, row, strict=True)
    ]
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first draw")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--pairs", type=int, default=16, help="to order by, and as many to judge on")
    parser.add_argument("--trained", type=int, default=0, metavar="STEPS", help="orders of trained gates too")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder = make_folder("FOLDER", chosen.folder)
    path = folder / ("trained.csv" if chosen.trained else "orders.csv")
    table = pd.read_csv(path) if path.exists() else pd.DataFrame({"kind": [], "draw": []})
    done = {*zip(table["kind"], table["draw"], strict=True)}
    draws = [(kind, draw) for draw in range(chosen.first, chosen.first + chosen.draws) for kind in chosen.kinds]
    for kind, draw in track([each for each in draws if each not in done], "draws"):
        table = pd.concat(
            [table, of_draw(kind, draw, chosen.pairs, str(folder / "cache"), chosen.trained)], ignore_index=True
        )
        write_bytes(path, table.to_csv(index=False).encode())
    table["order"] = table["order"].str.replace(r"random \d+", "random", regex=True)
    means = table.pivot_table(index=["kind", "order"], columns="kept", values="share", sort=False)
    table["off"] = (table["share"] - 1).abs()
    off = table.pivot_table(index=["kind", "order"], values="off", sort=False)
    print(means.join(off).round(2).to_string(), file=sys.stdout)


if __name__ == "__main__":
    main()
