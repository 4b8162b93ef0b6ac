"""Heads removed by this package, beside `prune_heads` of transformers 4.57.6, the last version that has it.

`python scripts/compare_prune_heads.py`: a BERT and a GPT-2 of base size lose the same heads of the same random weights
on both sides. It prints how far the outputs of both are apart, and how long a pass takes on each side against its own
whole model. The old version is installed into a temporary folder and runs in a process of its own, on the same torch.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
import transformers
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

import mhaprune
from benches.sides import timed
from mhaprune import losses
from mhaprune.heads import HeadMask
from mhaprune.measure.times import copies, taking_turns

VERSION = "4.57.6"
SIZES = {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
FAMILIES: dict[str, Callable[[bool], nn.Module]] = {
    "BERT": lambda small: BertModel(
        BertConfig(**SIZES, **({"hidden_size": 48, "intermediate_size": 48} if small else {}))
    ),
    "GPT-2": lambda small: GPT2Model(GPT2Config(**SIZES, **({"n_embd": 48} if small else {}))),
}
"""Models of 12 layers with 12 heads, of base size or narrow."""
HALF = "half of each layer"
GONE = {
    "none": {},
    HALF: {layer: list(range(1, 12, 2)) for layer in range(12)},
    "0 to 11 of a layer": {layer: list(range(layer)) for layer in range(12)},
}
"""The heads that go, by layer."""
Gone = dict[int, list[int]]
Prune = Callable[[Gone], nn.Module]
"""Makes a copy of a model without some heads."""
Outputs = dict[tuple[str, str], Tensor]
"""The last hidden states of real tokens, by family and by what is gone."""


def text(batch_size: int, length: int) -> dict[str, Tensor]:
    """All examples but the last are padded."""
    ids = torch.randint(1000, (batch_size, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:-1, length * 3 // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def by_us(model: nn.Module) -> Prune:
    heads = mhaprune.wrap(model, losses.drift, score=[text(2, 16)])

    def without(gone: Gone) -> nn.Module:
        removed = frozenset(head for head in heads.grid if head.head in gone.get(head.layer, []))
        return heads.subject.without(HeadMask(heads.grid, removed)).model

    return without


def by_transformers(model: nn.Module) -> Prune:
    def without(gone: Gone) -> nn.Module:
        pruned: Any = copy.deepcopy(model)
        pruned.prune_heads(gone)
        return pruned

    return without


@torch.no_grad()
def measured(
    pruner: Callable[[nn.Module], Prune], folder: Path, pairs: int, small: bool, clock: Callable[[], float]
) -> tuple[Outputs, pd.DataFrame]:
    """What the models of one side put out, and the ratios of their times; the weights are in the folder."""
    outputs: Outputs = {}
    rows: list[dict[str, Any]] = []
    for family, make in FAMILIES.items():
        model = make(small).eval()
        model.load_state_dict(torch.load(folder / f"{family}.pt"))
        prune = pruner(model)
        made = {name: prune(gone) for name, gone in GONE.items()}
        batch = text(2, 32)
        for name, pruned in made.items():
            outputs[family, name] = pruned(**batch).last_hidden_state[batch["attention_mask"] == 1]
        for batch_size in (1, 4):
            makers = {"pruned": partial(copy.deepcopy, made[HALF]), "whole": partial(copy.deepcopy, model)}
            batch = text(batch_size, 128)
            calls = {
                name: taking_turns([partial(each, **batch) for each in every])
                for name, every in copies(makers, number=2).items()
            }
            rows += timed([(f"{family}, batch {batch_size}", calls["pruned"], calls["whole"])], pairs, clock)
    return outputs, pd.DataFrame(rows)


def by_the_old_version(folder: Path, environment: Path, arguments: Sequence[str]) -> tuple[Outputs, pd.DataFrame]:
    """The same by `prune_heads`, in a process that finds the old version first."""
    path = os.pathsep.join([str(environment), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, *arguments, "--theirs", str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})
    return torch.load(folder / "outputs.pt"), pd.read_csv(folder / "times.csv")


def install(environment: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--target", str(environment), f"transformers=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"transformers {VERSION} could not be installed:\n{done.stderr}")


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="how often each is run, in turn, default 40")
    parser.add_argument("--processor-time", action="store_true", help="for a machine with other work on it")
    parser.add_argument("--small", action="store_true", help="narrow models, to try the script")
    parser.add_argument("--environment", type=Path, help=f"a folder with {VERSION}, by pip install --target")
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)  # what the process with the old version is given
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if chosen.processor_time else time.perf_counter
    if chosen.theirs:
        if transformers.__version__ != VERSION:
            parser.error(f"--environment: holds transformers {transformers.__version__}, must hold {VERSION}")
        outputs, times = measured(by_transformers, chosen.theirs, chosen.pairs, chosen.small, clock)
        torch.save(outputs, chosen.theirs / "outputs.pt")
        times.to_csv(chosen.theirs / "times.csv", index=False)
        return 0
    flags = [f"--{name}" for name in ("small", "processor-time") if getattr(chosen, name.replace("-", "_"))]
    with TemporaryDirectory() as name:
        folder = Path(name)
        environment = chosen.environment or folder / "environment"
        if not chosen.environment:
            install(environment)
        torch.manual_seed(0)
        for family, make in FAMILIES.items():
            torch.save(make(chosen.small).state_dict(), folder / f"{family}.pt")
        ours, our_times = measured(by_us, folder, chosen.pairs, chosen.small, clock)
        theirs, their_times = by_the_old_version(folder, environment, ["--pairs", str(chosen.pairs), *flags])
    rows = [
        {
            "model": family,
            "heads gone": gone,
            "ours - prune_heads": difference(ours[family, gone], theirs[family, gone]),
            "ours - whole": difference(ours[family, gone], ours[family, "none"]),
        }
        for family, gone in ours
    ]
    print("Largest difference of an output:")
    print(pd.DataFrame(rows).to_string(index=False))
    times = pd.concat({"ours": our_times, "prune_heads": their_times}, names=["side"]).reset_index(level="side")
    print(
        "\nHalf of the heads of each layer removed / whole, 128 tokens:",
        times.round(3).to_string(index=False),
        sep="\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
