"""Try mhaprune on tiny models of 125 families of transformers and on others: which of them can be cut, and is it right?

`python research/families.py` tries all of families.yaml and tiny_models.py; `python research/families.py llama bloom`
tries those. For each model, with eager and with fused attention where its class takes them:

- how many heads are found, and how many there are;
- whether they can be removed, or only gated, or are refused, and the reason;
- half of the heads, chosen at random, removed by `prune`, against the whole model whose W_O does not see them: hooks
  of this script set their columns of its input to zero. The largest difference is relative to the largest output;
- the smaller model, saved and read in new processes, by mhaprune and by its own library alone (read_folders.py).

It writes one row per model and kind of attention, as CSV, and prints a summary (families_report.py). It returns 1 if
anything raises an exception that is no line of mhaprune, or is not equal.

Made docs/findings/families.md.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

import mhaprune
from families_report import Row, summary, write
from mhaprune.api.wrap import Heads
from mhaprune.heads import HeadId
from mhaprune.measure.outcomes import ProofFailed
from read_folders import call, difference, numbers_in, outputs
from tiny_models import MODELS, Tiny
from trying import chosen_models

HERE = Path(__file__).parent


def size_of_outputs(output: Any, batch: Any) -> Tensor:
    """Return a loss, (B,), from every real number that belongs to an example."""
    rows = len(next(iter(batch.values())) if isinstance(batch, dict) else batch)
    of_each = [value.reshape(rows, -1) for value in numbers_in(output) if value.dim() and len(value) == rows]
    return torch.cat(of_each, dim=1).double().square().mean(dim=1)


def columns(heads: Tensor, K: int) -> Tensor:
    """Return the columns of the input of W_O that belong to some heads: h·K to (h+1)·K."""
    return (heads[:, None] * K + torch.arange(K)).flatten()


def blinded(model: nn.Module, heads: Heads, gone: Iterable[HeadId], width: int | None) -> nn.Module:
    """Return a copy of a model in which every W_O reads zeros from some heads.

    Only the names of the modules and of their heads are from mhaprune.
    """
    model = copy.deepcopy(model)
    for block, name in zip(heads.subject.blocks, heads.subject.names, strict=True):
        numbers = torch.tensor([head.head for head in gone if head.block == name], dtype=torch.long)
        if block.out.endswith("_map"):  # a parameter, with a dimension of heads or as in F.linear
            weight = model.get_parameter(block.out.removesuffix("_map"))
            if weight.dim() > 2:
                weight.data.index_fill_(list(weight.shape).index(block.heads), numbers, 0)
            else:
                weight.data[:, columns(numbers, weight.shape[1] // block.heads)] = 0
            continue
        out: Any = model.get_submodule(block.out.replace(".layer.out_proj", ".out_proj"))
        handed = hasattr(heads.subject.model.get_submodule(block.path), "called_maps")
        if handed or isinstance(out, nn.modules.linear.NonDynamicallyQuantizableLinear):  # its weight is read only
            out.weight.data[:, columns(numbers, width or out.in_features // block.heads)] = 0
            continue

        def hook(module: nn.Module, inputs: Any, numbers: Tensor = numbers, H: int = block.heads) -> Any:
            dim = 1 if isinstance(module, nn.Conv1d) else -1
            K = width or inputs[0].shape[dim] // H
            return inputs[0].index_fill(dim, columns(numbers, K), 0), *inputs[1:]

        out.register_forward_pre_hook(hook)
    return model


def check(row: Row, model: nn.Module, tiny: Tiny, folder: Path) -> None:
    """Find the heads of a model, remove half of them, compare, save, and note it in the row."""
    batch, begin = tiny.batch(), time.perf_counter()
    heads = mhaprune.wrap(model, size_of_outputs, score=[batch], call=call)
    row.seconds, row.found = time.perf_counter() - begin, len(heads.grid)
    why_not, stuck = heads.proven.why_not, heads.proven.stuck
    row.outcome = "gates only" if why_not else "removable"
    idle = f"{len(heads.proven.without_effect)} without effect" if heads.proven.without_effect else ""
    unseen = f"not seen: {', '.join(heads.unseen)}" if heads.unseen else ""
    parts = "" if why_not else "; ".join(f"{block} cannot be cut: {reason}" for block, reason in stuck.items())
    row.reason = "; ".join(filter(None, [why_not, parts, idle, unseen]))
    scores = torch.rand(len(heads.grid), generator=torch.Generator().manual_seed(2))
    free = [n for n in scores.argsort().tolist() if why_not or heads.grid.heads[n].block not in stuck]
    gone = [heads.grid.heads[n] for n in free[: len(scores) - round(len(scores) / 2)]]
    masked = outputs(blinded(model, heads, gone, tiny.width), batch)
    row.effect = difference(outputs(model, batch), masked)
    if why_not:
        with heads.closed([str(head) for head in gone]) as closed:
            row.difference = difference(outputs(closed, batch), masked)
        return
    small = heads.prune(keep=0.5, by=scores)
    row.difference = difference(said := outputs(small, batch), masked)
    place = folder / f"{row.model}-{row.kind}"
    mhaprune.save(small, place)
    torch.save({"name": row.model, "kind": row.kind, "batch": batch, "outputs": said}, f"{place}.pt")


def is_ours(error: Exception) -> bool:
    """Return whether an exception is one line that mhaprune wrote for its users."""
    (*_, last) = traceback.extract_tb(error.__traceback__)
    inside = Path(str(mhaprune.__file__)).parent in Path(last.filename).parents
    return isinstance(error, ValueError | ProofFailed) and inside and "\n" not in str(error)


def row_of(name: str, kind: str, folder: Path) -> Row:
    """Try one model with one kind of attention, and save what is left of it in the folder."""
    tiny = MODELS[name]
    row = Row(name, kind, tiny.heads)
    if missing := [package for package in tiny.needs if find_spec(package) is None]:
        row.outcome, row.reason = "skipped", f"needs the package {missing[0]}"
        return row
    try:
        model = tiny.make(kind)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        row.outcome = "not offered"
        return row
    try:
        check(row, model, tiny, folder)
    except Exception as error:  # it is what is asked for
        refused = is_ours(error) and not row.outcome  # what was called removable must be removed
        row.outcome = "refused" if refused else "raw"
        row.reason = str(error) if refused else f"{type(error).__name__}: {' '.join(str(error).split())}"
    return row


def tried(names: Sequence[str], folder: Path) -> Iterator[Row]:
    """Yield a row for every model and kind of attention."""
    cases = [(name, kind) for name in names for kind in MODELS[name].kinds]
    for name, kind in (bar := tqdm(cases, desc="try")):
        bar.set_postfix_str(name)
        yield row_of(name, kind, folder)


def read_back(folder: Path, *options: str) -> dict[str, float | str]:
    """Read all saved models in a new process."""
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(HERE / "read_folders.py"), str(folder), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    found: dict[str, float | str] = json.loads(done.stdout)
    return found


def all_tried(names: Sequence[str]) -> list[Row]:
    """Return the rows of these models, with what was read of the saved ones."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = list(tried(names, folder))
        loaded, alone = read_back(folder), read_back(folder, "--alone")
    for row in rows:
        place = f"{row.model}-{row.kind}"
        row.loaded, row.alone = loaded.get(place, row.loaded), alone.get(place, row.alone)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    if (chosen := chosen_models(__doc__, MODELS, "families.csv", arguments)) is None:
        return 1
    if find_spec("transformers") is not None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    try:
        rows = all_tried(chosen.names or list(MODELS))
    except KeyboardInterrupt:
        print("error: interrupted, nothing is written", file=sys.stderr)
        return 130
    chosen.csv.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(list(map(asdict, rows))).to_csv(chosen.csv, index=False)
    if chosen.page:
        write(chosen.page, rows)
    print(*summary(rows), f"All rows are in {chosen.csv}.", sep="\n")
    return int(any(row.is_wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
