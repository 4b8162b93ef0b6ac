"""Try mhaprune on small models of packages that nobody here wrote: which of them are cut, and is it right?

`python research/other_code.py` tries all models of other_models.py; `python research/other_code.py "vit-pytorch vit"`
tries those. A package that is not installed is skipped. All is computed in float64, with noise of 0.05 on every weight,
so that parts which begin with zeros act. For each model:

- how many heads are found, and how many there are by hand;
- whether they are cut, only gated, or refused, and the reason;
- half of the heads, chosen at random, removed by `prune`, against the whole model whose W_O does not see them: hooks
  of this script set their columns of its input to zero;
- the rise of the loss for each head by `score("ablation")`, against the same hooks;
- the smaller model, saved and read again into a model with other weights.

It writes a row for each model as CSV and, with --page, the table of a page. It returns 1 if anything is not equal, or
raises what is no line of mhaprune.

Made docs/findings/other-code.md.
"""

from __future__ import annotations

import copy
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

import mhaprune
from mhaprune.api.wrap import Heads
from mhaprune.heads import HeadId
from other_models import OTHERS, Other
from trying import chosen_models

EQUAL = 1e-9
"""The largest difference, relative to the largest output, of outputs that are called equal."""
OF_SCORES = 1e-4
"""The largest difference of equal scores, relative to the largest: scores are float32, as some layers' softmax is."""
OUTCOMES = ("cut", "partly", "gated", "refused", "wrong")
GENERATED = re.compile(r"(?<=<!-- table by research/other_code.py -->\n).*(?=<!-- end -->)", re.DOTALL)
"""The part of the page that holds the table."""


@dataclass
class Row:
    """The facts about a model."""

    package: str
    version: str
    model: str
    weighs: bool
    """See `Other.weighs`."""
    expected: int
    found: float = math.nan
    outcome: str = ""
    """cut, partly (some blocks are not cut, or heads not seen), gated, refused, skipped, not built (by a fault that is
    not mhaprune's) or wrong."""
    removed: float = math.nan
    """The relative difference of outputs without half of the heads; of closed ones if they can only be gated."""
    ablation: float = math.nan
    """The largest difference of a score of ablation, relative to the largest score."""
    loaded: float = math.nan
    """The relative difference of outputs after saving and reading."""
    seconds: float = math.nan
    """The processor time of `wrap`."""
    reason: str = ""


def size_of_outputs(output: Tensor, batch: Tensor) -> Tensor:
    return output.flatten(1).square().mean(dim=1)


def call(model: nn.Module, batch: Tensor) -> Any:
    return model(batch)


def made(other: Other, seed: int = 0) -> nn.Module:
    """Return the model in float64 and in evaluation, with noise on its weights."""
    torch.manual_seed(seed)
    model, generator = other.build().eval().double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


def outputs(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(batch)
    return result


def blinded(model: nn.Module, heads: Heads, gone: Iterable[HeadId], width: int | None) -> nn.Module:
    """Return a copy of a model in which every W_O reads zeros from some heads: the columns h·K to (h+1)·K.

    Only the names of the modules and of their heads are from mhaprune.
    """
    model = copy.deepcopy(model)
    for block, name in zip(heads.subject.blocks, heads.subject.names, strict=True):
        numbers = [head.head for head in gone if head.block == name]
        modules: dict[str, Any] = dict(model.named_modules())
        for path in block.outs:
            if path.endswith("_map"):  # a parameter, with a dimension of heads
                weight = model.get_parameter(path.removesuffix("_map"))
                weight.data.index_fill_(
                    list(weight.shape).index(block.heads), torch.tensor(numbers, dtype=torch.long), 0
                )
                continue
            out = modules.get(path) or modules[path.replace(".layer.out_proj", ".out_proj")]
            K = width or out.weight.shape[1] // block.heads
            columns = [column for h in numbers for column in range(h * K, (h + 1) * K)]
            with torch.no_grad():  # also right where its weight is handed to a function
                out.weight[:, columns] = 0
    return model


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def check(row: Row, other: Other, folder: Path) -> None:
    """Find the heads of a model, remove half of them, compare with a model that mhaprune never saw, save and read, and
    note it in the row. The model was not called before: it may fill tables in its first call."""
    model, batch = made(other), other.batch()
    unseen, batch = copy.deepcopy(model), batch.double() if batch.is_floating_point() else batch
    begin = time.process_time()
    heads = mhaprune.wrap(model, size_of_outputs, score=[batch], choose=[batch], call=call)
    row.seconds, row.found = time.process_time() - begin, len(heads.grid)
    why_not, stuck = heads.proven.why_not, heads.proven.stuck
    fewer = bool(heads.unseen) and row.found != row.expected  # a pooling without heads is named too
    row.outcome = "gated" if why_not else "partly" if stuck or fewer else "cut"
    reasons = [why_not] if why_not else [f"{block}: {why}" for block, why in stuck.items()][:1]
    row.reason = "; ".join([*reasons, *(f"not seen: {path}" for path in heads.unseen[:1])])
    drawn = torch.rand(len(heads.grid), generator=torch.Generator().manual_seed(2)).argsort().tolist()
    free = [heads.grid.heads[n] for n in drawn if why_not or heads.grid.heads[n].block not in stuck]
    gone = free[: math.ceil(len(free) / 2)]
    whole, masked = outputs(unseen, batch), outputs(blinded(unseen, heads, gone, other.width), batch)
    scores = heads.score("ablation").sort_index()["score"].tolist()
    some = [*range(min(8, len(scores)))]
    by_hand = [
        float(size_of_outputs(outputs(blinded(unseen, heads, [heads.grid.heads[n]], other.width), batch), batch).mean())
        - float(size_of_outputs(whole, batch).mean())
        for n in some
    ]
    largest = max(map(abs, by_hand)) or 1.0
    row.ablation = max(abs(scores[n] - mine) for n, mine in zip(some, by_hand, strict=True)) / largest
    if why_not:
        with heads.closed([str(head) for head in gone]) as gated:
            row.removed = apart(outputs(gated, batch), masked)
        return
    small = heads.prune(mask=[str(head) for head in gone])
    row.removed = apart(said := outputs(small, batch), masked)
    mhaprune.save(small, folder)
    row.loaded = apart(outputs(mhaprune.load(folder, model=made(other, seed=3)), batch), said)


def row_of(name: str) -> Row:
    other = OTHERS[name]
    row = Row(other.package, "", name, other.weighs, other.heads)
    try:
        row.version = version(other.package)
        batch = other.batch()
        outputs(made(other), batch.double() if batch.is_floating_point() else batch)
    except (PackageNotFoundError, ModuleNotFoundError) as error:
        row.outcome, row.reason = "skipped", str(error)
        return row
    except Exception as error:  # of a package that may be anybody's
        row.outcome, row.reason = "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return row
    try:
        with TemporaryDirectory() as folder:
            check(row, other, Path(folder) / "small")
    except ValueError as error:
        row.outcome = "wrong" if row.outcome in ("cut", "partly") or "\n" in str(error) else row.outcome or "refused"
        row.reason = str(error)
    except Exception as error:  # it is what is asked for
        row.outcome, row.reason = "wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    limits = ((row.removed, EQUAL), (row.ablation, OF_SCORES), (row.loaded, EQUAL))
    if not all(math.isnan(x) or x < limit for x, limit in limits):
        row.outcome = "wrong"
    return row


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence and the lines of the page's table: models by outcome and package."""
    tried = [row for row in rows if row.outcome not in ("skipped", "not built")]
    weighing = [row for row in tried if row.weighs]
    counts = Counter(row.outcome for row in weighing)
    said = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if counts[name])
    cut = [x for row in tried if row.outcome in ("cut", "partly") for x in (row.removed, row.loaded)]
    packages = len({row.package for row in tried})
    equal = (
        f" Removed and masked, and saved and read, differ by at most {max(cut):.0e} of the largest output."
        if cut
        else ""
    )
    yield (
        f"{len(tried)} classes of {packages} packages were tried. Of the {len(weighing)} with a softmax over positions:"
        f" {said or 'none'}.{equal}\n"
    )
    yield "| outcome | classes | which |"
    yield "|---|---|---|"
    for name in OUTCOMES:
        of = [row for row in tried if row.outcome == name]
        by_package = {row.package: f"{row.package} {sum(other.package == row.package for other in of)}" for row in of}
        which = by_package.values() if name == "cut" else [row.model for row in of]
        if of:
            yield f"| {name} | {len(of)} | {'; '.join(which)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    if (chosen := chosen_models(__doc__, OTHERS, "other_code.csv", arguments)) is None:
        return 1
    try:
        rows = [row_of(name) for name in tqdm(chosen.names or list(OTHERS), desc="try")]
    except KeyboardInterrupt:
        print("error: interrupted, nothing is written", file=sys.stderr)
        return 130
    chosen.csv.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(list(map(asdict, rows))).to_csv(chosen.csv, index=False)
    lines = list(table(rows)) if any(row.outcome != "skipped" for row in rows) else []
    print(*lines, sep="\n")
    for row in rows:
        if row.outcome in ("skipped", "not built"):
            print(f"{row.outcome}: {row.model}: {row.reason}")
    if chosen.page and (missing := [row for row in rows if row.outcome == "skipped"]):
        print(f"error: --page={chosen.page}: is not written, {missing[0].reason}", file=sys.stderr)
        return 1
    if chosen.page:
        all_rows = chosen.page.parent / "tables" / "other-code.csv"
        all_rows.write_text(pd.DataFrame(list(map(asdict, rows))).round({"seconds": 1}).to_csv(index=False))
        chosen.page.write_text(GENERATED.sub(lambda _: "\n".join(lines) + "\n", chosen.page.read_text()))
    return int(any(row.outcome == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
