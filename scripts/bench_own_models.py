"""What wrapping costs and removal brings for models of transformers, side by side: ratios, as in bench.py.

`python scripts/bench_own_models.py`: a BERT of base size on 128 tokens, and one of 6 x 12 heads of width 32.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from bench import Pair, timed
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import mhaprune
from mhaprune import losses
from mhaprune.adapters.batches import Batches
from mhaprune.adapters.heads import Heads
from mhaprune.heads import HeadMask
from mhaprune.measure import measure, measure_masks
from mhaprune.timing import COPIES, taking_turns


def text(examples: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 1000, (examples, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def bert(**sizes: Any) -> BertModel:
    torch.manual_seed(0)
    model: BertModel = BertModel(BertConfig(vocab_size=1000, **sizes)).eval()
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


def ablation(heads: Heads) -> list[Pair]:
    """Every head closed in turn, with what comes before it replayed, against one whole pass for each."""
    data = heads.splits["score"]
    masks = torch.ones(1 + len(heads.grid), len(heads.grid))
    masks[1:].fill_diagonal_(0.0)

    def plain() -> None:
        for gates_N in masks:
            measure(heads.subject, data, gates_N)

    return [("all heads ablated, replayed / one by one", partial(measure_masks, heads.subject, data, masks), plain)]


def peak_megabytes(call: Callable[[], object]) -> float:
    """The most memory that this process holds during a call, by the counter of Linux, beyond what it held before."""
    status = Path("/proc/self/status")

    def counter(name: str) -> float:
        return int(re.findall(rf"{name}:\s+(\d+) kB", status.read_text())[0]) / 1e3

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = counter("VmRSS")
    call()
    return counter("VmHWM") - before


def memory(heads: Heads) -> pd.DataFrame:
    """What a model weighs, and what scoring and pruning it take on top of it."""
    weights = heads.subject.count_parameters() * heads.subject.dtype.itemsize / 1e6
    calls: dict[str, Callable[[], object]] = {
        "scores by ablation, gate_output and taylor": partial(heads.score, "ablation", "gate_output", "taylor"),
        "half of the heads removed, proof in float64": partial(heads.prune, 0.5, "gate_output"),
    }
    rows = [{"what": name, "weights_mb": weights, "peak_mb": peak_megabytes(call)} for name, call in calls.items()]
    return pd.DataFrame(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="how often each is run, in turn, default 40")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"hidden_size": 48, "intermediate_size": 48} if chosen.small else {}
    base = mhaprune.wrap(bert(**sizes), losses.drift, score=[text(2, 16)])
    sizes = sizes or {"hidden_size": 384, "intermediate_size": 1536}
    small = mhaprune.wrap(bert(num_hidden_layers=6, **sizes), losses.drift, score=[text(16, 24)])
    if Path("/proc/self/clear_refs").exists():
        print(memory(base).round(0).to_string(index=False))
    rows = timed([*gates(base), *removal(base, 1), *removal(base, 8)], chosen.pairs)
    rows += timed(ablation(small), max(20, chosen.pairs // 2))
    print(pd.DataFrame(rows).round(3).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
