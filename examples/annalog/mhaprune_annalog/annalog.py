"""annalog, a writer of molecules that comes as a package and has attention of its own."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import pickle
import random
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.lab.sources.pretrained import Pretrained, PretrainedModel, batched, chosen
from mhaprune.lab.sources.texts import Row, in_splits, read_rows
from mhaprune.lab.tasks.base import SplitSize
from mhaprune.progress import track
from mhaprune.storage.cache import Cache, weights_digest
from mhaprune.subjects.batches import IGNORED

CORES = ("c1ccc({a})cc1{b}", "c1cc({a})cnc1{b}", "c1cc({a})ccc1{b}", "C1CCN({a})CC1{b}", "c1cc({a})sc1{b}")
FIRST = ("C", "OC", "Cl", "F", "C(F)(F)F", "C#N", "N(C)C", "CC", "C(C)C", "S(C)(=O)=O")
SECOND = ("C(=O)NC", "C(=O)O", "CO", "OCC", "NC(C)=O", "C(=O)N1CCOCC1", "CN1CCNCC1", "c1ccccc1", "C(=O)OC", "CCN")


INSTALL = "pip install --no-deps annalog==1.0.6"
LONGEST_ANSWER = 60
"""Tokens; the molecules have fewer."""


@dataclass(frozen=True)
class Annalog(Pretrained):
    """An encoder-decoder of three and three layers with eight heads that writes analogues of molecules. Its texts are
    molecules put together from parts, as SMILES, or those of the file `data`. It is judged by how well it predicts,
    token by token, what it answers with all its heads."""

    choose: SplitSize = 128
    """Number of texts that choices are made on."""
    report: SplitSize = 116
    """Number of texts that results are reported on."""

    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        name, judged_by = chosen(objective, {"likelihood": (losses.seq2seq, None)}, "model=annalog")
        reader = read_package()
        rows = [Row(text) for text in molecules()] if data is None else read_rows(data)
        splits = in_splits(rows, self.sizes, "model=annalog" if data is None else f"data={data}")

        def answers(state: Any, save: Any) -> dict[str, Any]:
            parts = [part for some in splits.values() for part in batched(some)]
            return {"batches": [reader.answered(part, self.max_length) for part in track(parts, "answers")]}

        what = {
            "texts": {split: [row.text for row in some] for split, some in splits.items()},
            "weights": weights_digest(reader.model),
            "max_length": self.max_length,
        }
        batches = iter(Cache(cache).get("answers", what, answers)["batches"])
        return PretrainedModel(
            model=reader.model,
            splits={split: [next(batches) for _ in batched(some)] for split, some in splits.items()},
            objective=judged_by,
            facts={"model_task": "seq2seq-lm", "objective": name},
            packages=["annalog"],
            call=call,
            tokens=reader.tokens,
        )


def call(model: nn.Module, batch: Any) -> Tensor:
    """The logits alone; the package returns the attention of the last layer too."""
    output: Tensor = model(batch["source"], batch["prefix"])[0]
    return output


class Reader(NamedTuple):
    """The model, and how it reads and answers."""

    model: nn.Module
    tokenize: Callable[[str], Sequence[str]]
    ids: dict[str, int]

    def tokens(self, batch: Any) -> list[list[str]]:
        names = {number: token for token, number in self.ids.items()}
        return [[names[i] for i in row.tolist() if i != self.ids["<pad>"]] for row in batch["source"]]

    @torch.no_grad()
    def answered(self, rows: Sequence[Row], max_length: int) -> dict[str, Tensor]:
        """A batch with the model's own greedy answers as labels."""
        pad, start, end, unknown = (self.ids[token] for token in ("<pad>", "<sos>", "<eos>", "<unk>"))
        read = [[self.ids.get(token, unknown) for token in self.tokenize(row.text)] for row in rows]
        read = [[start, *ids[: max_length - 2], end] for ids in read]
        longest = max(map(len, read))
        source = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in read])
        prefix = torch.full((len(rows), 1), start)
        done = torch.zeros(len(rows), dtype=torch.bool)
        while not done.all() and prefix.shape[1] < LONGEST_ANSWER:
            following = call(self.model, {"source": source, "prefix": prefix})[:, -1].argmax(-1).masked_fill(done, pad)
            prefix, done = torch.cat([prefix, following[:, None]], dim=1), done | (following == end)
        labels = prefix[:, 1:].masked_fill(prefix[:, 1:] == pad, IGNORED)
        mask = (source != pad).long()
        return {"source": source, "attention_mask": mask, "prefix": prefix[:, :-1], "labels": labels}


def read_package() -> Reader:
    """The model of the package, without what its `__init__` would import."""
    spec = importlib.util.find_spec("annalog")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"model=annalog: is not installed: {INSTALL}")
    folder = Path(spec.submodule_search_locations[0])
    for name, place in (("annalog", folder), ("annalog.model_files", folder / "model_files")):
        bare = types.ModuleType(name)
        bare.__path__ = [str(place)]
        bare.__spec__ = ModuleSpec(name, None, is_package=True)
        bare.__spec__.submodule_search_locations = [str(place)]
        sys.modules[name] = bare
    module = importlib.import_module("annalog.model_files.seq2seq_attention")
    weights = folder / "ckpt_and_vocab"
    with (weights / "stereo_experiment_vocab_ttf.pkl").open("rb") as file:
        ids: dict[str, int] = pickle.load(file)["stoi"]  # the package's own file
    tokenize = importlib.import_module("annalog.model_files.vocabulary").SMILESTokenizer().tokenize
    device, pad = torch.device("cpu"), ids["<pad>"]
    parts = [kind(len(ids), 256, 3, 8, 512, 0.1, device, 102) for kind in (module.Encoder, module.Decoder)]
    model = module.Seq2Seq(*parts, pad, pad, device)
    model.load_state_dict(torch.load(weights / "Lev_extended.pt", map_location=device))
    return Reader(model.eval(), tokenize, ids)


def molecules() -> list[str]:
    """Return molecules as SMILES, put together from common parts, in an order that is always the same."""
    found = [core.format(a=a, b=b) for core, a, b in itertools.product(CORES, FIRST, SECOND)]
    random.Random(0).shuffle(found)
    return found
