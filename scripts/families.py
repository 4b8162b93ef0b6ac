"""Try mhaprune on tiny models of 99 families of transformers and on others: which of them can be cut, and is it right?

`python scripts/families.py` tries all; `python scripts/families.py bert llama` those. families.yaml has the families,
other_models.py the others. For each model, with eager and with fused attention where its class takes them:

- the heads that are found, and how many there are;
- whether they can be removed, or only gated, or are refused, and the reason;
- half of the heads, chosen at random, removed by `prune`, against the whole model whose W_O does not see them: hooks
  of this script set their columns of its input to zero. The largest difference is relative to the largest output;
- the smaller model, saved and read in new processes, by mhaprune and by transformers alone (read_folders.py).

It writes one row per model and kind of attention, as CSV, and prints a summary.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
import yaml
from torch import Tensor, nn
from tqdm import tqdm

import mhaprune
from mhaprune.front.heads import Heads
from mhaprune.heads import HeadId
from mhaprune.measure.outcomes import ProofFailed
from other_models import OTHERS, tripled
from read_folders import call, difference, numbers_in, outputs

HERE = Path(__file__).parent
ROWS = 4
"""The examples of a batch. The texts of two of them are padded."""
EQUAL = 1e-5
"""The largest difference, relative to the largest output, of outputs that are called equal."""


@dataclass
class Row:
    """What was found about a model with one kind of attention."""

    model: str
    attention: str
    """eager or sdpa; empty for a model that is none of transformers."""
    expected: int
    """The number of heads, counted by hand."""
    found: int | None = None
    outcome: str = ""
    """removable, gates only, refused, not offered (by its class), skipped, or raw: an exception with no line of ours."""
    reason: str = ""
    difference: float = math.nan
    """Of the removed heads, or of the closed ones if they can only be gated, against hooks of this script."""
    loaded: float | str | None = None
    """The difference after `mhaprune.load` in a new process, or an error."""
    alone: float | str | None = None
    """The same for transformers without mhaprune."""
    seconds: float = math.nan
    """Of `wrap`."""


def batch_of(arguments: dict[str, list[Any]]) -> dict[str, Tensor]:
    """Return examples: for every argument what it holds, and its shape without the rows."""
    draw, batch = torch.Generator().manual_seed(1), {}
    for name, (kind, *sizes) in arguments.items():
        shape = (ROWS, *sizes)
        if kind == "real":
            batch[name] = torch.randn(shape, generator=draw)
        elif kind in ("ones", "padding"):
            batch[name] = torch.ones(shape, dtype=torch.long)
            batch[name][:2, sizes[0] * 2 // 3 :] = kind == "ones"
        else:
            batch[name] = torch.randint(3, 60, shape, generator=draw)
            batch[name][:, :4] = torch.where(torch.tensor(kind == "marked"), 63, batch[name][:, :4])  # for an image
    return batch


def make(family: dict[str, Any], attention: str) -> nn.Module | None:
    """Return a model with random weights, or None if its class does not take this kind of attention."""
    import transformers

    kind = getattr(transformers, family["model"])
    config = kind.config_class(**copy.deepcopy(family["config"]))
    torch.manual_seed(0)
    try:
        model = kind._from_config(config, attn_implementation=attention)
    except ValueError as error:
        if "does not support an attention implementation" in str(error):
            return None
        raise
    return tripled(model)


def size_of_outputs(output: Any, batch: Any) -> Tensor:
    """Return a loss, (B,), from every real number that belongs to an example."""
    rows = len(next(iter(batch.values())) if isinstance(batch, dict) else batch)
    of_each = [value.reshape(rows, -1) for value in numbers_in(output) if value.dim() and len(value) == rows]
    return torch.cat(of_each, dim=1).double().square().mean(dim=1)


def blinded(model: nn.Module, heads: Heads, gone: Iterable[HeadId], width: int | None) -> nn.Module:
    """Return a copy of a model in which every W_O reads zeros from some heads: columns h·K to (h+1)·K of its input.

    Only the names of the modules and the numbers of their heads are from mhaprune.
    """
    model = copy.deepcopy(model)
    for block, name in zip(heads.subject.blocks, heads.subject.names, strict=True):
        numbers = torch.tensor([head.head for head in gone if head.block == name], dtype=torch.long)
        out = model.get_submodule(block.out.replace(".layer.out_proj", ".out_proj"))
        if isinstance(out, nn.modules.linear.NonDynamicallyQuantizableLinear):  # torch.nn never calls it
            assert isinstance(out.weight, Tensor)
            out.weight.data[:, columns(numbers, width or out.in_features // block.heads)] = 0
            continue

        def hook(
            module: nn.Module, inputs: Any, numbers: Tensor = numbers, count: int = block.heads
        ) -> tuple[Tensor, ...]:
            features = 1 if isinstance(module, nn.Conv1d) else inputs[0].dim() - 1
            K = width or inputs[0].shape[features] // count
            return inputs[0].index_fill(features, columns(numbers, K), 0), *inputs[1:]

        out.register_forward_pre_hook(hook)
    return model


def columns(heads: Tensor, K: int) -> Tensor:
    return (heads[:, None] * K + torch.arange(K)).flatten()


def check(row: Row, model: nn.Module, batch: Any, folder: Path, width: int | None = None) -> None:
    """Find the heads of a model, remove half of them, compare and save, and note it in the row."""
    begin = time.perf_counter()
    heads = mhaprune.wrap(model, size_of_outputs, score=[batch], call=call)
    row.seconds, row.found = time.perf_counter() - begin, len(heads.grid)
    row.outcome, row.reason = "gates only" if heads.proven.why_not else "removable", heads.proven.why_not
    if idle := heads.proven.without_effect:
        row.reason += f"{len(idle)} heads without effect"
    scores = torch.rand(len(heads.grid), generator=torch.Generator().manual_seed(2))
    gone = [heads.grid.heads[n] for n in scores.argsort()[: len(scores) - round(len(scores) / 2)].tolist()]
    masked = outputs(blinded(model, heads, gone, width), batch)
    if row.outcome == "gates only":
        with heads.closed([str(head) for head in gone]) as closed:
            row.difference = difference(outputs(closed, batch), masked)
        return
    small = heads.prune(keep=0.5, by=scores)
    row.difference = difference(found := outputs(small, batch), masked)
    if difference(outputs(model, batch), masked) < 100 * EQUAL:
        row.reason = "the removed heads change too little for a comparison"
    place = folder / f"{row.model}-{row.attention}"
    mhaprune.save(small, place)
    torch.save({"batch": batch, "outputs": found}, f"{place}.pt")


def is_ours(error: Exception) -> bool:
    """Return whether an exception is one line that mhaprune wrote for its users."""
    (*_, last) = traceback.extract_tb(error.__traceback__)
    inside = Path(str(mhaprune.__file__)).parent in Path(last.filename).parents
    return isinstance(error, ValueError | ProofFailed) and inside and "\n" not in str(error)


def tried(names: Sequence[str], content: dict[str, Any], folder: Path) -> Iterator[Row]:
    """Yield a row for every model and kind of attention."""
    cases = [(name, kind) for name in names for kind in (["eager", "sdpa"] if name in content["families"] else [""])]
    for name, attention in (bar := tqdm(cases, desc="try", disable=None)):
        bar.set_postfix_str(name)
        family, other = content["families"].get(name), OTHERS.get(name)
        row = Row(name, attention, family["heads"] if family else other.heads)
        if other and (missing := [package for package in other.needs if find_spec(package) is None]):
            yield Row(name, "", other.heads, outcome="skipped", reason=f"needs the package {missing[0]}")
            continue
        model = make(family, attention) if family else other.make()
        if model is None:
            row.outcome = "not offered"
        else:
            batch = batch_of(content["inputs"][family["reads"]]) if family else other.batch()
            try:
                check(row, model, batch, folder, family.get("width") if family else None)
            except Exception as error:  # a raw one is what this looks for
                row.outcome = "refused" if is_ours(error) else "raw"
                row.reason = str(error) if row.outcome == "refused" else f"{type(error).__name__}: {error}"
        yield row


def read_back(folder: Path, *options: str) -> dict[str, float | str]:
    """Read all folders in a new process."""
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(HERE / "read_folders.py"), str(folder), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    found: dict[str, float | str] = json.loads(done.stdout)
    return found


def summary(table: pd.DataFrame) -> str:
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    content = yaml.safe_load((HERE / "families.yaml").read_text())
    known = [*content["families"], *OTHERS]
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to try; all if none is named")
    parser.add_argument("--csv", type=Path, default=HERE.parent / "results" / "families.csv")
    chosen = parser.parse_args()
    names = chosen.names or known
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = list(tried(names, content, folder))
        loaded, alone = read_back(folder), read_back(folder, "--alone")
        for row in rows:
            place = f"{row.model}-{row.attention}"
            row.loaded, row.alone = loaded.get(place), alone.get(place)
    table = pd.DataFrame(list(map(asdict, rows)))
    table.to_csv(chosen.csv, index=False)
    print(table.to_string(index=False, max_colwidth=150))
    return 0


if __name__ == "__main__":
    sys.exit(main())
